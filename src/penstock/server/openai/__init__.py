"""The OpenAI API's routes."""
