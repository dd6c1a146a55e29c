#include "simd_avx512.h"

#include "variant.inc"
