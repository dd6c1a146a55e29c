#include "simd_avx2.h" /* with __AVXVNNI__ from the compiler flags */

#include "variant.inc"
