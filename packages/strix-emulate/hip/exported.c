/* SPDX-License-Identifier: BSD-3-Clause */
/* Other functions that AMD's library exports. Most of them are not part of HIP's interface.
   Programs import them, but few programs call them. */
#include "device.h"
#include <string.h>

/* Conversions of float16. clang calls them if the processor has no instruction for the
   conversion. */
API_OF(float, __gnu_h2f_ieee)(unsigned short bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}
API_OF(unsigned short, __gnu_f2h_ieee)(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

/* Returns no precompiled header, like builds of AMD's library without one. */
API_OF(void, __hipGetPCH)(const char **header, unsigned *size) {
    *header = NULL;
    *size = 0;
}

/* The names and numbers by which a debugger identifies a build. */
API_OF(const char *, amd_dbgapi_get_build_name)(void) { return "strix-emulate"; }
API_OF(const char *, amd_dbgapi_get_git_hash)(void) { return ""; }
API_OF(size_t, amd_dbgapi_get_build_id)(void) { return 0; }

/* Tracers ask for the name of a command. This library supports no tracers, so no name is known. */
API_OF(const char *, hipGetCmdName)(uint32_t number) { return "unknown"; }

API_OF(hipChannelFormatDesc, hipCreateChannelDesc)(int x, int y, int z, int w,
                                                   enum hipChannelFormatKind kind) {
    return (hipChannelFormatDesc){x, y, z, w, kind};
}

/* The C++ names by which programs built with HIP before version 4 import hipExtModuleLaunchKernel
   and hipHccModuleLaunchKernel. */
API_OF(
    hipError_t,
    _Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j)
(hipFunction_t f, uint32_t x, uint32_t y, uint32_t z, uint32_t bx, uint32_t by, uint32_t bz,
 size_t lds, hipStream_t stream, void **values, void **extra, hipEvent_t start, hipEvent_t stop,
 uint32_t flags) {
    return hipExtModuleLaunchKernel(f, x, y, z, bx, by, bz, lds, stream, values, extra, start, stop,
                                    flags);
}
API_OF(
    hipError_t,
    _Z24hipHccModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_)
(hipFunction_t f, uint32_t x, uint32_t y, uint32_t z, uint32_t bx, uint32_t by, uint32_t bz,
 size_t lds, hipStream_t stream, void **values, void **extra, hipEvent_t start, hipEvent_t stop) {
    return hipExtModuleLaunchKernel(f, x, y, z, bx, by, bz, lds, stream, values, extra, start, stop,
                                    0);
}
