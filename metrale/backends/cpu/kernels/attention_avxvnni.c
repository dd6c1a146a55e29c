#include "simd_avx2.h" /* with __AVXVNNI__ from the compiler flags */

#include "abi.h"
#include "activation.inc"
#include "attention.h"
#include "attention.inc"
#include "kv.inc"
