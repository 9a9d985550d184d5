#include "personality.h"

const int soft_branch = SOFT_BRANCH;
const int soft_cuda_version = SOFT_CUDA_VERSION;
const int soft_ptx_version = SOFT_PTX_VERSION;
