// Package nvml reads cards through NVIDIA's management library, and is the
// only importer of go-nvml. It loads the library by path from the driver root,
// the software GPU's as well as a driver's.
//
// It never decides what a failing card means for its tenants, and it never
// lets one failing or hanging card keep the others from being read.
//
// Start reading at Driver.Inventory.
package nvml
