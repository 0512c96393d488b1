"""What the server remembers between requests, in Redis or Valkey."""
