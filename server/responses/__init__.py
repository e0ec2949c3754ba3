"""`/v1/responses`: items in, items and events out, and what is kept of them."""
