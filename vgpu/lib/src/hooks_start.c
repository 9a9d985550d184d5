/* SPDX-License-Identifier: Apache-2.0 */
/* The hook of the start: a program that must be a client of MPS, and isn't, ends here instead of running without its
 * limit. */
#include "start.h"

#include "contexts.h"
#include "limits.h"
#include "measure.h"
#include "throttle.h"

uint32_t carve_start_refused;

enum { SM_COUNT = 0 }; /* CU_EXEC_AFFINITY_TYPE_SM_COUNT */

/* What drivers round a percentage up to differs by card: two multiprocessors, on some eight. */
#define SM_STEP 8u

/* The most multiprocessors that a client with that percentage sees; 0: it can't be told. */
static uint32_t most(const struct carve_limits_card *card) {
    uint64_t count = ((uint64_t)card->multiprocessors * card->mps_percent + 99) / 100;
    count = (count + SM_STEP - 1) / SM_STEP * SM_STEP;
    return count < card->multiprocessors ? (uint32_t)count : 0;
}

/* A context can be held to some multiprocessors under MPS only, so that is how a client is told; what MPS left of
 * them is what the driver counts. */
static bool held(const struct carve_driver *d, const struct carve_limits_card *card, CUdevice device) {
    int supported = 0, count = 0;
    if (d->cuDeviceGetExecAffinitySupport == NULL || d->cuDeviceGetExecAffinitySupport(&supported, SM_COUNT, device) != CUDA_SUCCESS || supported == 0) {
        return false;
    }
    uint32_t allowed = most(card);
    return allowed == 0 || (d->cuDeviceGetAttribute != NULL && d->cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) == CUDA_SUCCESS && count > 0 && (uint32_t)count <= allowed);
}

static bool any_client(const struct carve_limits *limits) {
    struct carve_limits_facts facts;
    struct carve_limits_card about;
    for (unsigned card = 0; carve_limits_card(limits, card, &facts, &about); card++) {
        if (about.mps_percent != 0) {
            return true;
        }
    }
    return false;
}

/* The driver is asked even where the variables are there: they are the program's. */
static bool all_held(const struct carve_driver *d, struct carve_state *s) {
    int devices = 0;
    if (!any_client(s->limits)) {
        return true;
    }
    if (d->cuDeviceGetCount == NULL || d->cuDeviceGet == NULL || d->cuDeviceGetCount(&devices) != CUDA_SUCCESS) {
        return false;
    }
    for (int i = 0; i < devices; i++) {
        CUdevice device;
        struct carve_limits_facts facts;
        struct carve_limits_card about;
        if (d->cuDeviceGet(&device, i) != CUDA_SUCCESS) {
            return false;
        }
        int card = carve_device_card(d, s, device);
        /* On a card that the limits don't name nothing can be had. */
        if (card < 0) {
            continue;
        }
        if (!carve_limits_card(s->limits, (unsigned)card, &facts, &about) || (about.mps_percent != 0 && !held(d, &about, device))) {
            return false;
        }
    }
    return true;
}

CARVE_EXPORT CUresult cuInit(unsigned int flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuInit == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuInit(flags);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    /* Whatever needs a file is opened now: programs shut themselves in once they have what they need. A slot comes with
     * the first charge. Without limits nothing is to be had anyway, as long as there are none. */
    struct carve_limits_facts facts;
    struct carve_state *s = carve_state();
    if (s != NULL && carve_limits_facts(s->limits, &facts) && (facts.flags & CARVE_LIMITS_SELF_VISIBLE) != 0) {
        carve_measure_prepare();
    }
    if (s != NULL && carve_compute_divided(s)) {
        carve_mark_gone(s);
    }
    bool good = s == NULL || all_held(d, s);
    /* The driver has started all the same: contexts are refused from here on, too. */
    __atomic_store_n(&carve_start_refused, good ? 0 : 1, __ATOMIC_RELAXED);
    return good ? CUDA_SUCCESS : CUDA_ERROR_MPS_CONNECTION_FAILED;
}
