"""The engine: from token ids to tokens or arrays. Other packages import `client` only; `core` connects all parts."""
