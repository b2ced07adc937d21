"""Facts about a vision language model, for the front end: how it reads pictures and videos.

Sizes are in pixels, and heights stand before widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_RATIO = 200  # of a picture's edges
MAX_TILES = 64  # of a picture: choosing their grid takes time that is quadratic in it
TOKEN_BUDGETS = (70, 140, 280, 560, 1120)  # tokens of a picture that Gemma 4 was trained with
LARGEST_VALUE = 65504.0  # of float16: the largest of an embedding that a client may send
Filter = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]  # of resizing, by Pillow's names
Color = tuple[int, int, int]
SamplingRule = Literal["uniform", "qwen2_vl", "qwen3_vl", "glm4v", "glm46v", "internvl", "smolvlm"]
VideoText = Literal["tokens", "gemma4", "qwen3_vl", "glm4v", "glm46v", "internvl", "smolvlm"]


class FixedSize(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """Every picture becomes one image of a size, whatever its own is (CLIP, SigLIP).

    Attributes:
        height, width: of the image.
        tokens: placeholder tokens of it.
        resample: filter of resizing.
        shortest_edge: the shorter edge of a picture is resized to this, and its middle is cut out; None: the picture is
            resized to the image's size, whatever its shape is.
        square_color: a picture is first made a square by edges of this colour; None: it is not.
    """

    height: int
    width: int
    tokens: int
    resample: Filter = "bicubic"
    shortest_edge: int | None = None
    square_color: Color | None = None


class SmartResize(msgspec.Struct, frozen=True, kw_only=True, tag="smart"):
    """A picture keeps its shape; its edges become multiples of a number, within an area (Qwen-VL, GLM-V).

    Its tokens have rotary positions of time, height and width.

    Attributes:
        multiple: pixels of the edge of the square that a token stands for.
        merged: patches along that edge.
        min_pixels, max_pixels: the area.
        resample: filter of resizing.
        frames: how often the area counts: a still picture is as many equal frames.
        enlarges: pictures that are smaller than one token are enlarged to its size first.
        rounds: the edges of such a picture are rounded; otherwise fractions are cut off.
    """

    multiple: int
    min_pixels: int
    max_pixels: int
    resample: Filter = "bicubic"
    merged: int = 2
    frames: int = 1
    enlarges: bool = False
    rounds: bool = False


class SplitTiles(msgspec.Struct, frozen=True, kw_only=True, tag="split"):
    """A picture is enlarged, divided into tiles, and followed by the whole of it as a tile (Idefics 3, SmolVLM).

    Attributes:
        tile: edge of a tile.
        longest_edge: to which the longer edge of a picture is resized first.
        tokens: placeholder tokens of a tile.
        resample: filter of resizing.
        splits: pictures are divided; otherwise each is one tile.
    """

    tile: int
    longest_edge: int
    tokens: int
    resample: Filter = "lanczos"
    splits: bool = True


class PatchRows(msgspec.Struct, frozen=True, kw_only=True, tag="rows"):
    """A picture keeps its shape; a text token ends each row of patches (Pixtral, Mistral 3).

    Attributes:
        patch: edge of the square that a token stands for.
        longest_edge: larger pictures are reduced to it.
        row_end, end: the tokens' texts: between two rows, and behind the last one.
        resample: filter of resizing.
    """

    patch: int
    longest_edge: int
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"
    resample: Filter = "bicubic"


class AnyResolution(msgspec.Struct, frozen=True, kw_only=True, tag="anyres"):
    """A picture as one tile, then enlarged onto the best of some canvases, and divided into tiles (LLaVA-NeXT).

    The encoder puts the tiles together again, cuts off what the picture does not cover, and ends each row of patches
    with an embedding of its own.

    Attributes:
        tile: edge of a tile.
        canvases: their sizes, which are multiples of the tile's.
        patches: number of patches along the edge of a tile.
        tokens: placeholder tokens of the picture as one tile.
        max_tiles: more patches than those of so many tiles are reduced to about that number (LLaVA-OneVision).
        resample: filter of resizing.
    """

    tile: int
    canvases: tuple[tuple[int, int], ...]
    patches: int
    tokens: int
    max_tiles: int | None = None
    resample: Filter = "bicubic"


class GridTiles(msgspec.Struct, frozen=True, kw_only=True, tag="grid"):
    """A picture is stretched onto the grid of tiles whose shape is nearest to its own (InternVL, GOT-OCR 2).

    If there are several tiles, the whole of it follows as one more.

    Attributes:
        height, width: of a tile.
        tokens: placeholder tokens of a tile.
        min_tiles, max_tiles: number of tiles, without the last.
        resample: filter of resizing.
    """

    height: int
    width: int
    tokens: int
    min_tiles: int = 1
    max_tiles: int = 12
    resample: Filter = "bicubic"


class PanAndScan(msgspec.Struct, frozen=True, kw_only=True, tag="pan_and_scan"):
    """Every picture becomes an image of a size, and a long one is followed by parts of it of that size (Gemma 3).

    Attributes:
        height, width: of an image.
        tokens: placeholder tokens of an image.
        min_crop: smallest edge of a part of a picture.
        max_crops: most parts.
        min_ratio: of the longer edge to the shorter one, from which a picture is long.
        introduction, between: texts in front of the whole picture, and between it and its parts.
        resample: filter of resizing.
        splits: long pictures are followed by parts; otherwise each is one image.
    """

    height: int
    width: int
    tokens: int
    min_crop: int = 256
    max_crops: int = 4
    min_ratio: float = 1.2
    introduction: str = "Here is the original image "
    between: str = " and here are some crops to help you see better "
    resample: Filter = "bilinear"
    splits: bool = False


class PatchBudget(msgspec.Struct, frozen=True, kw_only=True, tag="budget"):
    """A picture keeps its shape; its edges become multiples of a patch, within a number of patches (SigLIP 2).

    Attributes:
        patch: edge of a patch.
        max_patches: most patches.
        tokens: placeholder tokens of the picture.
        resample: filter of resizing.
    """

    patch: int
    max_patches: int
    tokens: int
    resample: Filter = "bilinear"


class TokenBudget(msgspec.Struct, frozen=True, kw_only=True, tag="token_budget"):
    """A picture keeps its shape and becomes as large as a number of tokens allows (Gemma 4).

    Attributes:
        multiple: edge of the square of pixels that a token stands for.
        max_tokens: most placeholder tokens.
        largest: the largest number of them that a request may ask for.
        resample: filter of resizing.
    """

    multiple: int
    max_tokens: int
    largest: int
    resample: Filter = "bicubic"


class CanvasTiles(msgspec.Struct, frozen=True, kw_only=True, tag="canvas"):
    """A picture keeps its shape and lies on the best grid of tiles, from its upper left corner; the rest is black.

    If there are several tiles, the whole of it follows as one more (Llama 4). Text tokens end tiles and rows of them.

    Attributes:
        tile: edge of a tile.
        tokens: placeholder tokens of a tile.
        max_tiles: most tiles, without the last.
        enlarges: pictures are enlarged as far as their grid allows; otherwise only to one tile.
        tile_end, row_end: texts between the tiles of a row, and behind each row.
        whole: text in front of the last tile.
        resample: filter of resizing.
    """

    tile: int
    tokens: int
    max_tiles: int = 16
    enlarges: bool = False
    tile_end: str = "<|tile_x_separator|>"
    row_end: str = "<|tile_y_separator|>"
    whole: str = "<|image|>"
    resample: Filter = "bilinear"


class PaddedTiles(msgspec.Struct, frozen=True, kw_only=True, tag="padded"):
    """A picture is enlarged onto the smallest grid of tiles that holds it, from its upper left corner (Phi-4).

    If that has too many tiles, the grid is the one whose shape is nearest. The encoder makes an image of the whole
    picture of the tiles, cuts off what the picture does not cover, and ends each row with an embedding of its own.

    Attributes:
        tile: edge of a tile.
        patches: number of patches along it.
        max_tiles: most tiles.
        resample: filter of resizing.
    """

    tile: int
    patches: int
    max_tiles: int
    resample: Filter = "bilinear"

    @property
    def edge(self) -> int:
        """Number of tokens along the edge of a tile, each of which stands for four patches."""
        return -(-self.patches // 2)

    def covered(self, tiles: int, length: int) -> tuple[int, ...]:
        """Patches along the edge of each tile in a row that a picture covers, if it has so many pixels there."""
        padding = (tiles * self.tile - length) // (self.tile // self.patches)
        patches = tiles * self.patches - padding
        return tuple(min(self.patches, max(0, patches - tile * self.patches)) for tile in range(tiles))

    def tokens(self, rows: Sequence[int], columns: Sequence[int]) -> int:
        """Placeholder tokens of a picture that covers so many patches of tiles, see `covered`."""
        down, across = (sum(-(-patches // 2) for patches in covered) for covered in (rows, columns))
        return down * (across + 1) + 1 + self.edge * (self.edge + 1)


class TransformersProcessor(msgspec.Struct, frozen=True, kw_only=True, tag="processor"):
    """The processor that transformers has for the model prepares pictures, in worker processes.

    What becomes of a picture follows from its size alone, but only the processor knows it.

    Attributes:
        folder: the model's directory, which has the processor's config and tokenizer.
        input_bytes: about as many as the inputs of any picture have.
    """

    folder: str
    input_bytes: int


FrameGeometry = FixedSize | SmartResize | SplitTiles | TokenBudget  # of videos
Geometry = (
    FixedSize
    | SmartResize
    | SplitTiles
    | PatchRows
    | AnyResolution
    | GridTiles
    | PanAndScan
    | PaddedTiles
    | PatchBudget
    | TokenBudget
    | CanvasTiles
    | TransformersProcessor
)


class FrameSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames of a video are read.

    Attributes:
        rule: how they are chosen: that of a model's video processor in transformers.
        fps: frames for each second; None: the number alone decides.
        num_frames: number of frames, or in SmolVLM's rule the most; None: `fps` decides.
        min_frames, max_frames: bounds of what `fps` gives.
        max_seconds: length from which on GLM-4.1V spreads its frames over the whole video.
        shift: InternVL's first frame; None: the middle of the first part.
    """

    rule: SamplingRule
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 1
    max_frames: int = 768
    max_seconds: float = 300.0
    shift: float | None = None


class VideoSound(msgspec.Struct, frozen=True, kw_only=True):
    """How the sound of a video stands between its frames, if a request asks for it.

    Attributes:
        part: tokens of sound that follow each other, and rotary positions of time of the frames in front of them.
        token: text of the placeholder token of audio.
        before, after: texts of the tokens around frames and sound.
        is_heard: the sound is asked for.
    """

    part: int
    token: str
    before: str
    after: str
    is_heard: bool = False


class VideoInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How videos become items of a vision language model.

    Attributes:
        placeholder: the token that stands for each embedding; it may be that of pictures.
        placeholder_text: text that stands for a whole video in a rendered chat.
        geometry: how a frame is resized, and which tokens stand for it.
        sampling: which frames are read.
        text: what stands between the tokens of frames; `tokens`: nothing.
        token_text: text of `placeholder`; empty: it is `placeholder_text`.
        before, after: texts around the tokens of a frame.
        group: frames that are encoded together, with the tokens of one.
        shares_area: the area of `geometry` is that of all frames together.
        newline: a further embedding follows those of the last frame (LLaVA-OneVision).
        is_timed: tokens of frames have rotary positions of time that count on from frame to frame.
        tokens_per_second: rotary positions of a second; None: each group is one position later than the one before.
        nominal_rate: positions of time are those of frames at the rate that is asked for, or at this one, though the
            rate of those that are read differs a little from it; None: positions tell when frames are seen.
        ends_at_largest: text behind a timed video counts on from its largest position; otherwise from the larger edge
            of a frame, as behind a picture.
        sound: how the sound of videos is heard with their frames; None: it is not.
    """

    placeholder: int
    placeholder_text: str
    geometry: FrameGeometry
    sampling: FrameSampling
    text: VideoText = "tokens"
    token_text: str = ""
    before: str = ""
    after: str = ""
    group: int = 1
    shares_area: bool = False
    newline: bool = False
    is_timed: bool = False
    tokens_per_second: float | None = None
    nominal_rate: float | None = None
    ends_at_largest: bool = False
    sound: VideoSound | None = None

    @property
    def token(self) -> str:
        """Text of the placeholder token."""
        return self.token_text or self.placeholder_text


class PictureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How pictures become items of a vision language model, with placeholder tokens in its prompts.

    Attributes:
        placeholder: the token that stands for each embedding.
        placeholder_text: text that stands for a whole picture in a rendered chat; the front end replaces it by the text
            of the picture's layout.
        geometry: how a picture is resized and divided, and which tokens stand for it.
        token_text: text of `placeholder`; empty: it is `placeholder_text`.
        before, after: texts around the tokens of a picture, or of each of its parts in `PanAndScan`.
        bidirectional: the tokens of an item attend to each other in both directions; one step computes all of them.
        item_tokens: most tokens of an item: as many as the engine has room for, which sets it.
        video: how videos become items; None: the model does not read them.
        embedding_size: number of values of an embedding, which the engine sets.
        alone: a prompt is either a picture, with one token, or a text.
        without_text: a prompt with a picture has no text but that which the model was trained with.
    """

    placeholder: int
    placeholder_text: str
    geometry: Geometry
    token_text: str = ""
    before: str = ""
    after: str = ""
    bidirectional: bool = False
    item_tokens: int = 0
    video: VideoInfo | None = None
    embedding_size: int = 0
    alone: bool = False
    without_text: bool = False

    @property
    def token(self) -> str:
        """Text of the placeholder token."""
        return self.token_text or self.placeholder_text
