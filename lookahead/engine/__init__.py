"""One call of generate(), step by step."""
