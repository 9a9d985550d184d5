package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// Accounting reads what the driver has written down of a process, while it runs and
// for some time after its end. The error is gpu.ErrNotSupported where the card's
// accounting is off, as it is unless root turned it on.
func (d *Driver) Accounting(uuid string, pid int) (gpu.Account, error) {
	a, err := bounded(d, uuid, func() (gpu.Account, error) {
		var a gpu.Account
		dev, r := d.lib.DeviceGetHandleByUUID(uuid)
		if r != nvml.SUCCESS {
			return a, fault("open", r)
		}
		if mode, r := dev.GetAccountingMode(); r != nvml.SUCCESS || mode != nvml.FEATURE_ENABLED {
			return a, fmt.Errorf("read accounting: %w", gpu.ErrNotSupported)
		}
		s, r := dev.GetAccountingStats(uint32(pid))
		if r != nvml.SUCCESS {
			return a, fault("read accounting", r)
		}
		a = gpu.Account{Percent: int(s.GpuUtilization), PeakBytes: s.MaxMemoryUsage, Milliseconds: s.Time, Running: s.IsRunning != 0}
		return a, nil
	})
	if err != nil {
		return a, fmt.Errorf("card %s: %w", uuid, err)
	}
	return a, nil
}
