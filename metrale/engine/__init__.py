"""The engine: requests in, tokens and text out; knows no device and no kernel."""
