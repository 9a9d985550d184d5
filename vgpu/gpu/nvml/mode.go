package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

var computeModes = map[nvml.ComputeMode]gpu.ComputeMode{
	nvml.COMPUTEMODE_DEFAULT:           gpu.ComputeDefault,
	nvml.COMPUTEMODE_EXCLUSIVE_PROCESS: gpu.ComputeExclusiveProcess,
	nvml.COMPUTEMODE_PROHIBITED:        gpu.ComputeProhibited,
}

// ComputeMode reads how many processes may have contexts on a card.
func (d *Driver) ComputeMode(uuid string) (gpu.ComputeMode, error) {
	return bounded(d, uuid, func() (gpu.ComputeMode, error) {
		dev, r := d.lib.DeviceGetHandleByUUID(uuid)
		if r != nvml.SUCCESS {
			return "", fmt.Errorf("card %s: %w", uuid, fault("open", r))
		}
		mode, r := dev.GetComputeMode()
		if r != nvml.SUCCESS {
			return "", fmt.Errorf("card %s: %w", uuid, fault("read compute mode", r))
		}
		return computeMode(mode), nil
	})
}

func computeMode(mode nvml.ComputeMode) gpu.ComputeMode {
	if known, ok := computeModes[mode]; ok {
		return known
	}
	return gpu.ComputeOther
}

// SetComputeMode sets it, which takes root. It lasts until the driver is unloaded, or
// the last process lets go of a card without persistence mode. Processes that have
// contexts keep them.
func (d *Driver) SetComputeMode(uuid string, mode gpu.ComputeMode) error {
	_, err := bounded(d, uuid, func() (struct{}, error) {
		for number, known := range computeModes {
			if known != mode {
				continue
			}
			dev, r := d.lib.DeviceGetHandleByUUID(uuid)
			if r != nvml.SUCCESS {
				return struct{}{}, fault("open", r)
			}
			if r := dev.SetComputeMode(number); r != nvml.SUCCESS {
				return struct{}{}, fault("set it", r)
			}
			return struct{}{}, nil
		}
		return struct{}{}, fmt.Errorf("no such mode")
	})
	if err != nil {
		return fmt.Errorf("card %s: compute mode %s: %w", uuid, mode, err)
	}
	return nil
}

// multiprocessors counts a card's, 0 where they can't be told: the driver says how
// many cores it has, and how many of them a multiprocessor has is known by
// architecture.
func (d *Driver) multiprocessors(dev nvml.Device) int {
	if !d.has("nvmlDeviceGetNumGpuCores") {
		return 0
	}
	cores, r := dev.GetNumGpuCores()
	if r != nvml.SUCCESS {
		return 0
	}
	major, minor, r := dev.GetCudaComputeCapability()
	if r != nvml.SUCCESS {
		return 0
	}
	each := 128
	switch {
	case major < 7:
		return 0
	case major == 7, major == 8 && minor == 0: // Volta, Turing, the large Ampere
		each = 64
	}
	if cores%each != 0 {
		return 0
	}
	return cores / each
}
