from quire.engine.client.protocol import PixelArray

def resize(
    pixels: PixelArray, height: int, width: int, new: PixelArray, new_height: int, new_width: int, resample: int, /
) -> None: ...
