// Softplus of vectors of floats.
#pragma once

// log(1 + e^x), relative error below 1e-6: the series of 2 artanh(y / (2 + y)) for y = e^-|x|, which is at most 1.
INLINE Floats vector_softplus(Floats x) {
    Floats decay = vector_exp(minimum(x, -x)), s = decay / (2.0f + decay), square = s * s, series = broadcast(1.0f / 13);
    for (float factor : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) series = series * square + factor;
    return select(x == x, maximum(x, broadcast(0.0f)) + 2.0f * s * series, x);
}
