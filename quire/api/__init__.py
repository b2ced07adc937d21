"""HTTP endpoints. Packages from low to high: http and protocol, answers, serving, chat, other endpoint families."""
