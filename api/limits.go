package api

// AdvisoryMeans says what it means that limits are advisory, in every place that
// says they are.
const AdvisoryMeans = "a program that goes past carve's library (a driver library of its own, calls straight to the driver) isn't stopped at its limit; what it takes is seen within four seconds, and from then on its container is granted nothing more"

// AdvisoryMPSMeans is the same of a container in mode mps. MPS has its limit from the
// container's environment, which is the program's own.
const AdvisoryMPSMeans = "the MPS server holds a program that goes past carve's library to the same amount, unless it changed CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment before it started CUDA; then it isn't stopped at its limit"
