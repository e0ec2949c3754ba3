"""Images that clients send: found, fetched, checked and decoded before the model sees them."""
