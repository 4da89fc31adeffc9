/* SPDX-License-Identifier: BSD-3-Clause */
/* The number of devices, the current device of a thread, contexts, and peer access. All devices
   have the same properties, except for UUID and PCI bus, and share one memory, as if several GPUs
   were in one APU. */
#include "device.h"
#include <stddef.h>
#include <stdlib.h>

#define MOST 16
static char contexts[MOST];
static _Thread_local int current;
static unsigned peers[MOST]; /* for each device, a bit mask of the peers that it may access */

static hipCtx_t context_of(int device) { return (hipCtx_t)(contexts + device); }

int device_count(void) {
    static int count;
    if (!count) {
        const char *text = getenv("STRIX_EMULATE_DEVICES");
        int wanted = text ? atoi(text) : 1;
        count = wanted < 1 ? 1 : wanted > MOST ? MOST : wanted;
    }
    return count;
}

bool device_exists(int device) { return device >= 0 && device < device_count(); }

int device_current(void) { return current; }

API(hipGetDeviceCount)(int *count) {
    ANSWER(count, hipErrorInvalidValue);
    *count = device_count();
    return hipSuccess;
}
API(hipSetDevice)(int device) {
    ANSWER(device_exists(device), hipErrorInvalidDevice);
    current = device;
    return hipSuccess;
}
API(hipGetDevice)(int *device) {
    ANSWER(device, hipErrorInvalidValue);
    *device = current;
    return hipSuccess;
}
API(hipDeviceGet)(hipDevice_t *device, int ordinal) {
    ANSWER(device && device_exists(ordinal), hipErrorInvalidDevice);
    *device = ordinal;
    return hipSuccess;
}
API(hipSetValidDevices)(int *devices, int count) {
    ANSWER(devices && count >= 1, hipErrorInvalidValue);
    for (int i = 0; i < count; i++) ANSWER(device_exists(devices[i]), hipErrorInvalidDevice);
    return hipSuccess;
}

/* Each device has exactly one context. */
API(hipCtxGetCurrent)(hipCtx_t *context) {
    ANSWER(context, hipErrorInvalidValue);
    *context = context_of(current);
    return hipSuccess;
}
API(hipCtxSetCurrent)(hipCtx_t context) {
    if (!context) return hipSuccess;
    ptrdiff_t device = (char *)context - contexts;
    ANSWER(device >= 0 && device < device_count(), hipErrorInvalidValue);
    current = (int)device;
    return hipSuccess;
}
API(hipCtxPushCurrent)(hipCtx_t context) { return hipCtxSetCurrent(context); }
API(hipCtxPopCurrent)(hipCtx_t *context) {
    return context ? hipCtxGetCurrent(context) : hipSuccess;
}
API(hipCtxGetDevice)(hipDevice_t *device) { return hipGetDevice(device); }
API(hipCtxSynchronize)(void) {
    ENTER();
    LEAVE(hipSuccess);
}
API(hipDeviceSynchronize)(void) { return hipCtxSynchronize(); }
API(hipDevicePrimaryCtxRetain)(hipCtx_t *context, hipDevice_t device) {
    ANSWER(context && device_exists(device), hipErrorInvalidDevice);
    *context = context_of(device);
    return hipSuccess;
}
API(hipDevicePrimaryCtxGetState)(hipDevice_t device, unsigned *flags, int *active) {
    ANSWER(device_exists(device) && flags && active, hipErrorInvalidValue);
    return *flags = 0, *active = 1, hipSuccess;
}
API(hipGetDeviceFlags)(unsigned *flags) {
    ANSWER(flags, hipErrorInvalidValue);
    return *flags = 0, hipSuccess;
}
HINT(hipDevicePrimaryCtxRelease)(hipDevice_t device) { return hipSuccess; }
HINT(hipDevicePrimaryCtxSetFlags)(hipDevice_t device, unsigned flags) { return hipSuccess; }
HINT(hipSetDeviceFlags)(unsigned flags) { return hipSuccess; }

static bool are_peers(int device, int peer) {
    return device_exists(device) && device_exists(peer) && device != peer;
}
API(hipDeviceCanAccessPeer)(int *can, int device, int peer) {
    ANSWER(can, hipErrorInvalidValue);
    ANSWER(device_exists(device) && device_exists(peer), hipErrorInvalidDevice);
    *can = are_peers(device, peer);
    return hipSuccess;
}
API(hipDeviceEnablePeerAccess)(int peer, unsigned flags) {
    ENTER();
    REQUIRE(!flags, hipErrorInvalidValue);
    REQUIRE(are_peers(current, peer), hipErrorInvalidDevice);
    REQUIRE(!(peers[current] & 1u << peer), hipErrorPeerAccessAlreadyEnabled);
    peers[current] |= 1u << peer;
    LEAVE(hipSuccess);
}
API(hipDeviceDisablePeerAccess)(int peer) {
    ENTER();
    REQUIRE(are_peers(current, peer), hipErrorInvalidDevice);
    REQUIRE(peers[current] & 1u << peer, hipErrorPeerAccessNotEnabled);
    peers[current] &= ~(1u << peer);
    LEAVE(hipSuccess);
}
API(hipDeviceGetP2PAttribute)(int *value, hipDeviceP2PAttr attribute, int device, int peer) {
    ANSWER(value, hipErrorInvalidValue);
    ANSWER(are_peers(device, peer), hipErrorInvalidDevice);
    *value = attribute == hipDevP2PAttrAccessSupported ||
             attribute == hipDevP2PAttrNativeAtomicSupported;
    return hipSuccess;
}
/* The link type is 2, HSA's number for PCIe. */
API(hipExtGetLinkTypeAndHopCount)(int device, int peer, uint32_t *type, uint32_t *hops) {
    ANSWER(type && hops, hipErrorInvalidValue);
    ANSWER(are_peers(device, peer), hipErrorInvalidDevice);
    return *type = 2, *hops = 1, hipSuccess;
}
