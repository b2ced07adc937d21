"""The Responses API: conversations of items, told in events, remembered in a database."""
