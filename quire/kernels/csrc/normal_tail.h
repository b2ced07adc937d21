// The probability that a normal variable is below -x, for 0 <= x: erfc(x / sqrt(2)) / 2.
#pragma once

#if defined(HAVE_AVX512)
// Coefficients, in ascending order, of polynomials in 4 x - i, for x up to 1/8 away from i / 4: they interpolate the
// function in the Chebyshev nodes of that interval.
alignas(64) constexpr float NORMAL_TAIL[][2 * LANES] = {
    {5.0000000e-1f, 4.0129367e-1f, 3.0853754e-1f, 2.2662735e-1f, 1.5865526e-1f, 1.0564978e-1f, 6.6807203e-2f,
     4.0059157e-2f, 2.2750132e-2f, 1.2224473e-2f, 6.2096654e-3f, 2.9797633e-3f, 1.3498981e-3f, 5.7702506e-4f,
     2.3262908e-4f, 8.8417284e-5f, 3.1671243e-5f, 1.0688525e-5f, 3.3976730e-6f, 1.0170833e-6f, 2.8665158e-7f,
     7.6049602e-8f, 1.8989562e-8f, 4.4621724e-9f, 9.8658770e-10f, 2.0522634e-10f, 4.0160007e-11f, 7.3922578e-12f,
     1.2798125e-12f, 2.0838581e-13f, 3.1908917e-14f, 4.5946273e-15f},
    {-9.9735379e-2f, -9.6666865e-2f, -8.8016242e-2f, -7.5284362e-2f, -6.0492758e-2f, -4.5662385e-2f, -3.2379512e-2f,
     -2.1569412e-2f, -1.3497785e-2f, -7.9349214e-3f, -4.3820627e-3f, -2.2733693e-3f, -1.1079410e-3f, -5.0724554e-4f,
     -2.1815964e-4f, -8.8142384e-5f, -3.3454078e-5f, -1.1927977e-5f, -3.9951910e-6f, -1.2570739e-6f, -3.7156610e-7f,
     -1.0317225e-7f, -2.6911669e-8f, -6.5943002e-9f, -1.5179118e-9f, -3.2822634e-10f, -6.6672799e-11f,
     -1.2722475e-11f, -2.2805594e-12f, -3.8402308e-13f, -6.0746113e-14f, -9.0265980e-15f},
    {-8.1420116e-17f, 3.0208356e-3f, 5.5010063e-3f, 7.0578940e-3f, 7.5615756e-3f, 7.1347272e-3f, 6.0711405e-3f,
     4.7182972e-3f, 3.3744418e-3f, 2.2316990e-3f, 1.3694009e-3f, 7.8147859e-4f, 4.1548526e-4f, 2.0607429e-4f,
     9.5448813e-5f, 4.1319174e-5f, 1.6728385e-5f, 6.3374155e-6f, 2.2476072e-6f, 7.4652007e-7f, 2.3228064e-7f,
     6.7725523e-8f, 1.8508047e-8f, 4.7416027e-9f, 1.1389965e-9f, 2.5657781e-10f, 5.4209366e-11f, 1.0743365e-11f,
     1.9973938e-12f, 3.4840623e-13f, 5.7022251e-14f, 8.7573491e-15f},
    {1.0358741e-3f, 9.4143330e-4f, 6.8623014e-4f, 3.4313602e-4f, 1.2270700e-6f, -2.6572909e-4f, -4.1981842e-4f,
     -4.6208882e-4f, -4.2111732e-4f, -3.3564513e-4f, -2.3984686e-4f, -1.5574935e-4f, -9.2667899e-5f, -5.0792139e-5f,
     -2.5743555e-5f, -1.2098722e-5f, -5.2833416e-6f, -2.1471963e-6f, -8.1316608e-7f, -2.8725989e-7f, -9.4737622e-8f,
     -2.9189300e-8f, -8.4068290e-9f, -2.2644535e-9f, -5.7069211e-10f, -1.3461918e-10f, -2.9731533e-11f,
     -6.1497084e-12f, -1.1915867e-12f, -2.1633436e-13f, -3.6807685e-14f, -5.8700290e-15f},
    {-4.5470836e-16f, -4.6070345e-5f, -7.8556746e-5f, -8.9370769e-5f, -7.8612815e-5f, -5.3373551e-5f, -2.3765351e-5f,
     1.4361864e-6f, 1.7472343e-5f, 2.3897674e-5f, 2.3140710e-5f, 1.8561121e-5f, 1.2992332e-5f, 8.1314956e-6f,
     4.6122505e-6f, 2.3908369e-6f, 1.1389787e-6f, 5.0064739e-7f, 2.0364295e-7f, 7.6823952e-8f, 2.6926005e-8f,
     8.7801464e-9f, 2.6667371e-9f, 7.5511947e-10f, 1.9950347e-10f, 4.9212402e-11f, 1.1340603e-11f, 2.4425841e-12f,
     4.9192746e-13f, 9.2673197e-14f, 1.6336260e-14f, 2.6954062e-15f},
};
constexpr int NORMAL_TAIL_DEGREE = std::size(NORMAL_TAIL) - 1;

// For x up to 7.8; absolute error below 1e-7.
inline Floats normal_tail(Floats x) {
    Floats scaled = 4.0f * x, shifted = scaled + 8388608.0f;  // 2^23: the lowest bits are the nearest integer
    Floats r = scaled - (shifted - 8388608.0f), p = broadcast(0.0f);
#pragma GCC unroll 8
    for (int i = NORMAL_TAIL_DEGREE; i >= 0; i--) {
        __m512 low = _mm512_load_ps(NORMAL_TAIL[i]), high = _mm512_load_ps(NORMAL_TAIL[i] + LANES);
        Floats coefficient = (Floats)_mm512_permutex2var_ps(low, (__m512i)shifted, high);
        p = i == NORMAL_TAIL_DEGREE ? coefficient : p * r + coefficient;
    }
    return p;
}
#else
// For x up to 14; relative error below 4e-7. erfc(z) = t exp(p(t) - z * z) with t = 1 / (1 + z / 2); p is a polynomial
// fitted in 2.4 t - 1.4.
inline Floats normal_tail(Floats x) {
    Floats t = 1.0f / (1.0f + 0.3535533906f * x), s = 2.4f * t - 1.4f, p = broadcast(5.48602468e-5f);
    p = p * s + 7.27287902e-5f;
    p = p * s - 5.34320610e-4f;
    p = p * s - 2.25964162e-4f;
    p = p * s + 3.70747674e-3f;
    p = p * s - 1.06340791e-3f;
    p = p * s - 2.94703369e-2f;
    p = p * s + 1.57473061e-2f;
    p = p * s + 5.70307103e-1f;
    p = p * s - 5.58595398e-1f;
    return 0.5f * t * vector_exp(p - 0.5f * x * x);
}
#endif
