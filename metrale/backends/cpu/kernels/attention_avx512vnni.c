#include "simd_avx512.h"

#include "abi.h"
#include "activation.inc"
#include "attention.h"
#include "attention.inc"
#include "kv.inc"
