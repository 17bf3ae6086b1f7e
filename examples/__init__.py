"""Examples. Penstock's wheel does not contain them."""
