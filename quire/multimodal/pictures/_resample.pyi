from quire.engine.client.protocol import PixelArray

def resize(
    pixels: PixelArray,
    height: int,
    width: int,
    band: PixelArray,
    new_height: int,
    new_width: int,
    resample: int,
    first: int,
    most_products: int,
    /,
) -> None: ...
