package api

// AdvisoryMeans says what it means that limits are advisory, in every place that
// says they are.
const AdvisoryMeans = "a program that goes past carve's library (a driver library of its own, calls straight to the driver) isn't stopped at its limit; what it takes is seen within four seconds, and from then on its container is granted nothing more"
