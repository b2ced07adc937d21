"""What the scripts with pictures send, and the answer that they expect to the first question.

Arguments: the server's URL, the model, a URL of the picture, its file, a PDF file, and the answer.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

URL, MODEL, PICTURE_URL, _PICTURE_FILE, _PDF_FILE, ANSWER = sys.argv[1:]
SERVER = URL.removesuffix("/v1")
QUESTION = "What is in it?"
PICTURE = base64.b64encode(Path(_PICTURE_FILE).read_bytes()).decode()
DATA_URL = f"data:image/png;base64,{PICTURE}"
PDF = base64.b64encode(Path(_PDF_FILE).read_bytes()).decode()
TOKENS = 8  # of each answer
TOOL = "take_photo"
