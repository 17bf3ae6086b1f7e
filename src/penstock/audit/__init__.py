"""`penstock audit`: whether a server of the OpenAI API ever answers from the state of another request."""
