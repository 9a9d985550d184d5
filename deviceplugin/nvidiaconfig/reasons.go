package nvidiaconfig

import (
	"maps"
	"slices"
)

// reasons say, by key, why what stands there has no effect here.
var reasons = map[string]string{
	"resources": "cards are nvidia.com/gpu with carve, whatever their model: pods choose models by annotation carve.dev/card-models",
	"imex":      "IMEX channels aren't handed out",
	"health":    "health is read by carve's agent, and can't be turned off here",
}

// flag is a key of NVIDIA's flags.
type flag struct {
	// as lists the values that mean what carve does anyway; none of them is told.
	as []any
	// why says what the key would change, and what to do instead.
	why string
}

var flags = map[string]flag{
	"migStrategy":             {[]any{"none"}, "MIG isn't served: cards in MIG mode take no pods"},
	"failOnInitError":         {[]any{false, true}, ""},
	"nvidiaDriverRoot":        {[]any{"/"}, "carve finds the driver by its own flag: set CARVE_NODE_DRIVER_ROOT in ConfigMap carve-node"},
	"driverRoot":              {[]any{"/"}, "carve finds the driver by its own flag: set CARVE_NODE_DRIVER_ROOT in ConfigMap carve-node"},
	"nvidiaDevRoot":           {[]any{"/", ""}, "carve finds the device nodes by its own flag: set CARVE_NODE_DEV_ROOT in ConfigMap carve-node"},
	"mpsRoot":                 {[]any{""}, "carve's MPS keeper has its files under /run/carve/mps"},
	"gdrcopyEnabled":          {[]any{false}, "GPUDirect RDMA copies aren't handed out"},
	"gdsEnabled":              {[]any{false}, "GPUDirect Storage isn't handed out"},
	"mofedEnabled":            {[]any{false}, "Mellanox' devices aren't handed out"},
	"useNodeFeatureAPI":       {[]any{false, true}, ""},
	"deviceDiscoveryStrategy": {[]any{"auto", "nvml"}, "cards are found by NVML"},
	"plugin":                  {},
	"gfd":                     {},
}

// pluginFlags are those below flags.plugin.
var pluginFlags = map[string]flag{
	"passDeviceSpecs":                  {[]any{false, true}, ""},
	"deviceListStrategy":               {nil, "containers get their cards from carve's hook, by no list"},
	"deviceIDStrategy":                 {[]any{"uuid"}, "containers get their cards from carve's hook, which knows them by UUID"},
	"cdiAnnotationPrefix":              {nil, "containers get their cards from carve's hook, without CDI"},
	"cdiFeatureFlags":                  {nil, "containers get their cards from carve's hook, without CDI"},
	"nvidiaCTKPath":                    {nil, "containers get their cards from carve's hook, without NVIDIA's"},
	"nvidiaCDIHookPath":                {nil, "containers get their cards from carve's hook, without NVIDIA's"},
	"containerDriverRoot":              {nil, "carve finds the driver by its own flag: set CARVE_NODE_DRIVER_ROOT in ConfigMap carve-node"},
	"sharedDevicesAllocationPolicy":    {nil, "the extender chooses cards: pods say carve.dev/card-policy"},
	"shared-devices-allocation-policy": {nil, "the extender chooses cards: pods say carve.dev/card-policy"},
}

func (r *reader) flags(at string, m map[string]any) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		switch k {
		case "plugin":
			plugin := r.object(join(at, k), m[k])
			for _, k := range slices.Sorted(maps.Keys(plugin)) {
				r.flag("flags.plugin."+k, pluginFlags, k, plugin[k])
			}
		case "gfd":
			if len(r.object(join(at, k), m[k])) > 0 {
				r.warn("flags.gfd", "carve labels no nodes: these are for NVIDIA's feature discovery, which may run beside it")
			}
		default:
			r.flag(join(at, k), flags, k, m[k])
		}
	}
}

func (r *reader) flag(at string, known map[string]flag, key string, v any) {
	f, is := known[key]
	switch {
	case !is:
		r.warn(at, "nothing is known of this key: it has no effect")
	case v == nil || slices.Contains(f.as, v) || f.why == "":
	default:
		r.warn(at, "%v: %s", v, f.why)
	}
}
