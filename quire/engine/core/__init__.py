"""The engine core: its loop, the validation of requests, sleep."""
