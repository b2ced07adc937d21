"""The engine: from token ids to tokens or arrays. Other packages import `wire` only; `core` connects all parts."""
