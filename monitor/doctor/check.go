package doctor

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/carve-gpu/carve/api"
)

const (
	// oldestDriver is the first driver that carve serves.
	oldestDriver = 535
	// skewNoted is from when a difference of clocks is worth a word. carve
	// compares no clocks of different machines, but certificates do: those that
	// it makes allow for skewRefused.
	skewNoted   = 30 * time.Second
	skewRefused = time.Hour
)

// Check judges a node. Each check answers with at least one finding, in an
// order that is always the same.
func Check(f Facts) []api.Finding {
	var out []api.Finding
	for _, check := range []func(Facts) []api.Finding{
		agent, nri, defaultRuntime, toolkitEnv, toolkitNRI, cdi, driver, software, devices, persistence, computeMode, mig,
		cgroup, limits, compute, runDir, kubelet, slots, sharing, mps, journal, unadjusted, library, clock,
	} {
		for _, found := range check(f) {
			if found.Where == "" {
				found.Where = "node " + f.Node
			}
			out = append(out, found)
		}
	}
	return out
}

func ok(check, where, what string) []api.Finding {
	return []api.Finding{{Check: check, Level: api.LevelOK, Where: where, What: what}}
}

func warn(check, where, what, why, do string) []api.Finding {
	return []api.Finding{{Check: check, Level: api.LevelWarn, Where: where, What: what, Why: why, Do: do}}
}

func fail(check, where, what, why, do string) []api.Finding {
	return []api.Finding{{Check: check, Level: api.LevelFail, Where: where, What: what, Why: why, Do: do}}
}

func agent(f Facts) []api.Finding {
	const check = "agent"
	switch a := f.Agent; {
	case a == nil:
		return fail(check, "", "no agent answers here: "+f.AgentFault,
			"no slice is prepared here, and containers that ask for a share wait",
			"kubectl -n carve-system get pods -l app.kubernetes.io/name=carve-node --field-selector spec.nodeName="+f.Node+"\n"+
				"no pod: kubectl label node "+f.Node+" carve.dev/managed=true; else its log says why: kubectl -n carve-system logs POD")
	case a.NotReady != "":
		return fail(check, "", "the agent is not ready: "+a.NotReady,
			"the extender sends no pods here until it is", "mend what it says; the other findings name the usual causes")
	case a.Refused > 0:
		return warn(check, "", fmt.Sprintf("the agent runs (%s), and refuses the grants of %d pod(s)", a.Version, a.Refused),
			"their containers get no card: the grant is another pod's or node's, or there is no room for it",
			"kubectl get events -A --field-selector reason=GrantRefused; delete such a pod, so that it is placed anew")
	default:
		return ok(check, "", "the agent runs ("+a.Version+") and is ready")
	}
}

func nri(f Facts) []api.Finding {
	const check = "nri"
	why := "without NRI the hook never sees a container: those that ask for a share start without a card, and the node takes none"
	linked := f.Agent != nil && !f.Agent.LinkedSince.IsZero()
	switch {
	case f.Runtime.NRI == "off":
		what := "NRI is switched off"
		if linked {
			what += " in the configuration; it is still on in the running runtime, until that is restarted"
		}
		return fail(check, f.Runtime.ConfigPath, what, why, mendNRI(f.Runtime))
	case linked:
		return ok(check, f.Runtime.NRISocket, "NRI is on, the hook is linked since "+f.Agent.LinkedSince.UTC().Format(time.RFC3339))
	case f.Runtime.NRISocketFault != "":
		return fail(check, f.Runtime.NRISocket, "nobody serves NRI: "+f.Runtime.NRISocketFault, why, mendNRI(f.Runtime))
	case f.Agent != nil:
		return fail(check, f.Runtime.NRISocket, "NRI is served, but the hook has no link to it",
			why, "it connects again by itself; why it can't stands in its log: kubectl -n carve-system logs $(kubectl -n carve-system get pods -l app.kubernetes.io/name=carve-node --field-selector spec.nodeName="+f.Node+" -o name)")
	default:
		return ok(check, f.Runtime.NRISocket, "NRI is served")
	}
}

// mendNRI is the text that switches NRI on in the runtime at hand.
func mendNRI(r Runtime) string {
	path := r.ConfigPath
	if r.Kind == "cri-o" {
		return "in /etc/crio/crio.conf.d/10-nri.conf:\n[crio.nri]\n  enable_nri = true\nthen: systemctl restart crio (1.30 and later have it on)"
	}
	if path == "" {
		path = "/etc/containerd/config.toml"
	}
	note := "containerd 2.0 and later have it on unless told otherwise"
	if r.ConfigVersion <= 2 {
		note = "containerd 1.7 ships it off; 1.6 and earlier have none"
	}
	return "in " + path + ":\n[plugins.\"io.containerd.nri.v1.nri\"]\n  disable = false\nthen: systemctl restart containerd (" + note + ")"
}

func defaultRuntime(f Facts) []api.Finding {
	const check = "default-runtime"
	r := f.Runtime
	switch {
	case r.Kind == "":
		return warn(check, "", "no configuration of containerd or CRI-O was found", "nothing can be said of the default runtime",
			"name it: carve doctor --node --runtime-config FILE, or CARVE_NODE_RUNTIME_CONFIG for the agent")
	case r.ConfigFault != "":
		return warn(check, r.ConfigPath, "the configuration can't be read: "+r.ConfigFault, "nothing can be said of the default runtime", "")
	case !isNVIDIA(r.DefaultBinary) && !isNVIDIA(r.DefaultRuntime):
		name := r.DefaultRuntime
		if name == "" {
			name = "runc, by default"
		}
		return ok(check, r.ConfigPath, "the default runtime is "+name)
	case f.Toolkit.AcceptEnv || f.Toolkit.ConfigFault != "":
		return fail(check, r.ConfigPath, "NVIDIA's runtime is the default one ("+r.DefaultRuntime+"), and hands out what NVIDIA_VISIBLE_DEVICES names",
			"any container that names a card there gets the whole of it past carve whenever the hook is away",
			"make runc the default one: default_runtime_name = \"runc\"; pods that need NVIDIA's name the RuntimeClass. Or "+mendEnv(f.Toolkit))
	default:
		return warn(check, r.ConfigPath, "NVIDIA's runtime is the default one ("+r.DefaultRuntime+"); it hands out nothing to unprivileged containers",
			"one setting of the toolkit keeps whole cards from being handed out past carve",
			"make runc the default one: default_runtime_name = \"runc\"")
	}
}

func isNVIDIA(name string) bool { return strings.Contains(name, "nvidia") }

func mendEnv(t Toolkit) string {
	path := t.ConfigPath
	if path == "" {
		path = "/etc/nvidia-container-runtime/config.toml"
	}
	return "in " + path + ", above the first [section]:\naccept-nvidia-visible-devices-envvar-when-unprivileged = false"
}

func toolkitEnv(f Facts) []api.Finding {
	const check = "toolkit-env"
	t, runtimes := f.Toolkit, strings.Join(f.Runtime.NVIDIARuntimes, ", ")
	switch {
	case t.ConfigPath == "" && runtimes == "":
		return ok(check, "", "NVIDIA's container toolkit isn't set up here")
	case t.ConfigFault != "":
		return warn(check, t.ConfigPath, "the toolkit's configuration can't be read: "+t.ConfigFault, "it may hand out whole cards past carve", "")
	case runtimes == "":
		return ok(check, t.ConfigPath, "NVIDIA's toolkit is here, and no runtime of this node uses it")
	case t.AcceptMounts:
		return fail(check, t.ConfigPath, "unprivileged containers get the cards that their mounts name",
			"a pod with runtimeClassName "+runtimes+" can take whole cards past carve: the hook doesn't touch such mounts",
			"in "+t.ConfigPath+":\naccept-nvidia-visible-devices-as-volume-mounts = false")
	case isNVIDIA(f.Runtime.DefaultBinary) || isNVIDIA(f.Runtime.DefaultRuntime):
		return ok(check, t.ConfigPath, "NVIDIA's runtime is every pod's: see default-runtime")
	case t.AcceptEnv:
		return warn(check, t.ConfigPath, "unprivileged containers get the cards that NVIDIA_VISIBLE_DEVICES names",
			"a pod with runtimeClassName "+runtimes+" can take whole cards past carve whenever the hook is away; while it is linked it empties that variable",
			mendEnv(t))
	default:
		return ok(check, t.ConfigPath, "NVIDIA's runtime ("+runtimes+") hands out nothing to unprivileged containers")
	}
}

func toolkitNRI(f Facts) []api.Finding {
	const check = "toolkit-nri"
	if f.Toolkit.NRIPlugin == "" {
		return ok(check, "", "no other NRI plugin that hands out cards was found")
	}
	return fail(check, f.Toolkit.NRIPlugin, "NVIDIA's NRI plugin runs here",
		"it gives a pod any card that its annotation nvidia.cdi.k8s.io/… names, whole and past carve",
		"start the toolkit without it (GPU Operator: cdi.nriPluginEnabled=false; else drop --enable-nri-plugin and ENABLE_NRI_PLUGIN)")
}

func cdi(f Facts) []api.Finding {
	const check = "cdi"
	if len(f.Toolkit.CDISpecs) == 0 {
		return ok(check, "", "no CDI specification of NVIDIA's")
	}
	return ok(check, strings.Join(f.Toolkit.CDISpecs, ", "), "NVIDIA's CDI specification is here: of use to Docker and Podman, and out of pods' reach unless NVIDIA's NRI plugin or device plugin runs")
}

func driver(f Facts) []api.Finding {
	const check = "driver"
	d := f.Driver
	where := "driver root " + d.Root
	if d.Version == "" {
		return fail(check, where, "no driver was found: "+d.Fault, "no card can be served", "install NVIDIA's driver R535 or later, or name its root: CARVE_NODE_DRIVER_ROOT (GPU Operator: /run/nvidia/driver)")
	}
	major, _, _ := strings.Cut(d.Version, ".")
	n, err := strconv.Atoi(major)
	switch {
	case err != nil:
		return warn(check, where, "the driver's version "+d.Version+" can't be read", "carve serves R535 and later", "")
	case n < oldestDriver:
		return fail(check, where, fmt.Sprintf("the driver is %s", d.Version), fmt.Sprintf("carve serves R%d and later: older ones lack calls that the limits need", oldestDriver), "upgrade the driver")
	}
	return ok(check, where, "driver "+d.Version)
}

func software(f Facts) []api.Finding {
	const check = "software-gpu"
	if f.Driver.Software || f.Agent != nil && f.Agent.Software {
		return warn(check, "driver root "+f.Driver.Root, "the cards of this node are software", "they are a test instrument: nothing computes on them",
			"on a node with real cards, take --software-gpu (CARVE_NODE_SOFTWARE_GPU) away")
	}
	return ok(check, "", "the cards are real")
}

func devices(f Facts) []api.Finding {
	const check = "device-nodes"
	var out []api.Finding
	if len(f.Devices) == 0 {
		return fail(check, "/dev", "there is no /dev/nvidia…", "containers can't be given a card", "nvidia-modprobe -u -c 0; modprobe nvidia-uvm (nvidia-smi makes the nodes of the cards)")
	}
	control := false
	for _, d := range f.Devices {
		control = control || strings.HasSuffix(d.Path, "/nvidiactl")
		if d.Fault != "" {
			out = append(out, fail(check, d.Path, "it can't be used: "+d.Fault, "containers get this node as it is", "rm "+d.Path+"; nvidia-modprobe -u -c 0")...)
			continue
		}
		if f.Driver.Software {
			continue // its nodes are stand-ins with numbers of their own
		}
		if want, name, known := majorOf(d.Path, f.Majors); known && want != d.Major {
			out = append(out, fail(check, d.Path, fmt.Sprintf("its major number is %d, the kernel has %s at %d", d.Major, name, want),
				"opening it reaches another driver, or none", "rm "+d.Path+"; nvidia-modprobe -u -c 0")...)
		}
	}
	if !control {
		out = append(out, fail(check, "/dev/nvidiactl", "it is missing", "no program can open a card without it", "nvidia-modprobe")...)
	}
	if out == nil {
		return ok(check, "/dev", fmt.Sprintf("%d device nodes, with the kernel's numbers", len(f.Devices)))
	}
	return out
}

// majorOf is what a device node's major number must be, where /proc/devices
// says: drivers before R550 call themselves nvidia-frontend there.
func majorOf(path string, majors map[string]int64) (major int64, name string, known bool) {
	base := path[strings.LastIndexByte(path, '/')+1:]
	names := []string{"nvidia", "nvidia-frontend"}
	switch {
	case strings.HasPrefix(base, "nvidia-uvm"):
		names = []string{"nvidia-uvm"}
	case strings.HasPrefix(base, "nvidia-cap"):
		names = []string{"nvidia-caps"}
	case strings.HasPrefix(base, "nvidia-"):
		return 0, "", false // modeset, nvswitch, …: carve hands none out
	}
	for _, n := range names {
		if m, ok := majors[n]; ok {
			return m, n, true
		}
	}
	return 0, "", false
}

func persistence(f Facts) []api.Finding {
	const check = "persistence"
	var off []string
	seen := false
	for _, c := range cardsOf(f) {
		seen = seen || c.Persistence != ""
		if c.Persistence == "disabled" {
			off = append(off, strconv.Itoa(c.Index))
		}
	}
	switch {
	case off != nil:
		return warn(check, "card "+strings.Join(off, ", "), "persistence mode is off",
			"the driver is loaded anew for each first process: pods start seconds later, and settings are lost in between", "nvidia-smi -pm 1 (or the service nvidia-persistenced)")
	case !seen:
		return ok(check, "", "persistence mode wasn't looked at: the agent tells it")
	}
	return ok(check, "", "persistence mode is on")
}

func computeMode(f Facts) []api.Finding {
	const check = "compute-mode"
	var out []api.Finding
	for _, c := range cardsOf(f) {
		where, do := fmt.Sprintf("card %d (%s)", c.Index, c.UUID), fmt.Sprintf("nvidia-smi -i %d -c DEFAULT", c.Index)
		switch c.ComputeMode {
		case "":
		case "prohibited":
			out = append(out, fail(check, where, "its compute mode is PROHIBITED, which carve hasn't set", "no program can use it, and it takes no slices", do)...)
		default:
			out = append(out, warn(check, where, "its compute mode is "+c.ComputeMode+", which carve hasn't set",
				"one process at a time can use it: of several containers, or of one with several processes, the others get CUDA_ERROR_DEVICE_UNAVAILABLE", do)...)
		}
	}
	if out == nil {
		return ok(check, "", "no card has a compute mode that carve hasn't set")
	}
	return out
}

func cardsOf(f Facts) []Card {
	if f.Agent == nil {
		return nil
	}
	return f.Agent.Cards
}

func mig(f Facts) []api.Finding {
	const check = "mig"
	var on []string
	for _, c := range cardsOf(f) {
		if c.MIGMode == "enabled" {
			on = append(on, strconv.Itoa(c.Index))
		}
	}
	if on != nil {
		return warn(check, "card "+strings.Join(on, ", "), "MIG mode is on", "carve doesn't serve MIG yet, and a card in this mode runs nothing without instances", "nvidia-smi -i "+strings.Join(on, ",")+" -mig 0")
	}
	return ok(check, "", "no card is in MIG mode")
}

func cgroup(f Facts) []api.Finding {
	const check = "cgroup"
	switch {
	case f.Cgroup.Version == 0:
		return fail(check, "/sys/fs/cgroup", "no cgroup hierarchy was found", "containers can't be kept from devices", "mount it")
	case !f.Cgroup.Devices:
		return fail(check, "/sys/fs/cgroup", "cgroup v1 without the devices controller", "every container can open every card", "mount the controller devices, or boot with cgroup v2")
	}
	return ok(check, "/sys/fs/cgroup", fmt.Sprintf("cgroup v%d, device rules hold", f.Cgroup.Version))
}

func limits(f Facts) []api.Finding {
	const check = "limits"
	switch a := f.Agent; {
	case a == nil || a.Enforcement == "":
		return ok(check, "", "what holds memory limits wasn't looked at: the agent tells it")
	case a.Enforcement == "advisory":
		return warn(check, "", "memory limits are advisory, as the library in the containers alone holds them ("+a.EnforcementReason+")",
			api.AdvisoryMeans, "let no one run programs here whom you wouldn't trust with the card, or run a kernel with the dmem controller (Linux 6.14) and a driver that registers its memory there (R615)")
	default:
		return ok(check, "", "memory limits are held by "+a.Enforcement+" beside the library, whatever a program does")
	}
}

func compute(f Facts) []api.Finding {
	const check = "compute"
	var out []api.Finding
	for _, c := range cardsOf(f) {
		if c.ComputeFault == "" {
			continue
		}
		do := ""
		if strings.Contains(c.ComputeFault, "hostPID") {
			do = "run the agent with hostPID: true, on the node itself and not in a container that stands for one"
		}
		out = append(out, warn(check, "card "+strconv.Itoa(c.Index), c.ComputeFault,
			"shares of compute hold all the same, by turns of their processes: launches wait longer, and what each container uses isn't shown", do)...)
	}
	if out != nil {
		return out
	}
	return ok(check, "", "nothing is amiss with what the driver says of processes' compute")
}

func runDir(f Facts) []api.Finding {
	const check = "run-dir"
	r := f.RunDir
	switch {
	case r.Fault != "":
		return fail(check, r.Path, "it can't be used: "+r.Fault, "limits and usage files have no place", "")
	case r.Mode&0o022 != 0 || r.UID != 0:
		return fail(check, r.Path, fmt.Sprintf("it belongs to user %d with mode %o", r.UID, r.Mode), "who can write there can set limits", "chown root: "+r.Path+"; chmod 0755 "+r.Path)
	case f.Agent != nil && !r.Shared:
		return fail(check, r.Path, "mounts made there by the agent don't reach the node", "containers would get the directory below a slice's own usage file system",
			"give the volume mountPropagation: Bidirectional, and the node: mount --make-rshared /")
	case !r.Tmpfs:
		return warn(check, r.Path, "it isn't on a tmpfs", "limits survive a reboot that their containers don't, and usage costs disk writes", "point --run-dir below /run")
	}
	return ok(check, r.Path, "on a tmpfs, the agent's mounts reach the runtime")
}

func kubelet(f Facts) []api.Finding {
	const check = "kubelet"
	switch {
	case f.Kubelet.Fault != "":
		return fail(check, f.Kubelet.Dir, "the kubelet's device-plugin socket can't be used: "+f.Kubelet.Fault, "slots can't be registered, so no pod that names nvidia.com/gpu fits here", "name the kubelet's directory: CARVE_NODE_KUBELET_DIR")
	case f.Agent != nil && !f.Agent.KubeletConnected:
		return fail(check, f.Kubelet.Dir, "the kubelet doesn't listen to the device plugin", "the node offers no slots", "the agent registers again whenever kubelet.sock appears: look at its log, and at the kubelet's")
	}
	return ok(check, f.Kubelet.Dir, "the kubelet's device-plugin directory is in use")
}

// sharing tells of a configuration of NVIDIA's; where none is followed there is nothing to
// tell.
func sharing(f Facts) []api.Finding {
	const check = "nvidia-config"
	if f.Agent == nil || f.Agent.Sharing == nil {
		return nil
	}
	s := f.Agent.Sharing
	switch {
	case s.Fault != "":
		return fail(check, s.Path, "NVIDIA's configuration isn't taken: "+s.Fault,
			"cards are given as the last good one said, or whole", "mend the file, or the node's label "+api.LabelNVIDIAConfig+"; it is read again at once")
	case s.Source == "":
		return ok(check, s.Path, "there is no configuration of NVIDIA's for this node")
	case len(s.Warnings) > 0:
		return warn(check, s.Source, "NVIDIA's configuration is in force, and some of it has no effect: "+strings.Join(s.Warnings, "; "),
			"whoever wrote that expects it", "take it out of the file; README says what to write instead")
	}
	return ok(check, s.Source, "NVIDIA's configuration is in force")
}

// mps tells of the cards that are given in mode mps; where none is there is nothing to
// tell.
func mps(f Facts) []api.Finding {
	const check = "mps"
	var out []api.Finding
	var well []string
	for _, c := range cardsOf(f) {
		switch {
		case c.MPS == nil:
		case c.MPS.Fault == "":
			well = append(well, strconv.Itoa(c.Index))
		default:
			since := ""
			if !c.MPS.Since.IsZero() {
				since = " since " + c.MPS.Since.UTC().Format(time.RFC3339)
			}
			out = append(out, fail(check, fmt.Sprintf("card %d (%s)", c.Index, c.UUID), "its MPS daemon doesn't serve"+since+": "+c.MPS.Fault,
				api.MPSDownMeans, api.MendMPS(f.Node))...)
		}
	}
	if well != nil {
		out = append(out, ok(check, "card "+strings.Join(well, ", "), "its MPS daemon serves, or is started for the first time")...)
	}
	return out
}

func slots(f Facts) []api.Finding {
	const check = "slots"
	if f.Agent == nil {
		return ok(check, "", "slots and amounts weren't looked at: the agent tells them")
	}
	var out []api.Finding
	held := 0
	for _, c := range f.Agent.Cards {
		where := fmt.Sprintf("card %d (%s)", c.Index, c.UUID)
		held += c.Slices
		if c.Fault != "" && c.ComputeMode != "prohibited" { // see compute-mode
			out = append(out, fail(check, where, "the card can't be used: "+c.Fault, "it takes no slices; pods that hold one keep it and fail to use it", "nvidia-smi -q -i "+strconv.Itoa(c.Index)+"; dmesg | grep -i xid")...)
		}
		if c.GrantedMiB > c.MemoryMiB || c.GrantedCores > 100 {
			out = append(out, fail(check, where, fmt.Sprintf("%d of %d MiB and %d%% of compute are granted", c.GrantedMiB, c.MemoryMiB, c.GrantedCores),
				"more is handed out than there is: pods fail to allocate within their limits", "carve slices --local; end one of its pods, and report this")...)
		}
		if f.Agent.SlotsPerCard > 0 && c.Slices >= f.Agent.SlotsPerCard {
			out = append(out, warn(check, where, fmt.Sprintf("all of its %d slots are taken", f.Agent.SlotsPerCard),
				"no further pod fits, whatever memory is free", "kubectl patch gpunode "+f.Node+" --type=merge -p '{\"spec\":{\"slotsPerCard\":64}}'")...)
		}
	}
	if out == nil {
		return ok(check, "", fmt.Sprintf("%d cards, %d slices of %d slots", len(f.Agent.Cards), held, len(f.Agent.Cards)*f.Agent.SlotsPerCard))
	}
	return out
}

func journal(f Facts) []api.Finding {
	const check = "journal"
	j := f.Journal
	switch {
	case j.Fault != "":
		return fail(check, j.Dir, "it can't be read: "+j.Fault, "after a restart the agent doesn't know what it handed out", "")
	case len(j.Damaged) > 0:
		return warn(check, j.Dir, fmt.Sprintf("%d record(s) were set aside as damaged: %s", len(j.Damaged), strings.Join(j.Damaged, ", ")),
			"their pods' own grants brought the slices back; the disk may be failing", "look at them, then rm "+j.Dir+"/*.damaged")
	case f.Agent != nil && j.Records != f.Agent.Records:
		// Between two looks a pod may have come or gone: the agent writes before
		// it counts.
		return ok(check, j.Dir, fmt.Sprintf("%d records, the agent holds %d pods at this moment", j.Records, f.Agent.Records))
	}
	return ok(check, j.Dir, fmt.Sprintf("%d records", j.Records))
}

func unadjusted(f Facts) []api.Finding {
	const check = "unadjusted"
	if f.Agent == nil {
		return ok(check, "", "containers weren't looked at: the agent knows them")
	}
	if n := f.Agent.Unadjusted; n > 0 {
		return warn(check, "", fmt.Sprintf("%d container(s) started while the hook was away and have no card", n),
			"they were granted one and can't use it", "delete their pods (kubectl get events -A --field-selector reason=StartedWithoutCard names them); without --keep-unadjusted the agent stops them by itself")
	}
	return ok(check, "", "every container with a grant went through the hook")
}

func library(f Facts) []api.Finding {
	const check = "front-library"
	switch {
	case f.Library.Unknown:
		return ok(check, "", "the installed front libraries weren't compared: the agent knows what it came with")
	case f.Library.Fault != "":
		return fail(check, f.Library.Dir, "what is installed for containers isn't what the agent came with: "+f.Library.Fault,
			"containers may run without a limit, or not at all", "mv "+f.Library.Dir+" "+f.Library.Dir+".bad, then restart the node's carve-node pod (running containers keep what they have open)")
	}
	if f.Agent != nil && f.Agent.PlainFront != "" {
		return warn(check, f.Library.Dir, "containers get a front library that isn't made for this driver: "+f.Agent.PlainFront,
			"limits hold, but programs in containers can't be linked with -lcuda, and dlsym finds functions that the driver lacks",
			"install the driver's libraries anew, and report its version if that changes nothing")
	}
	return ok(check, f.Library.Dir, "the installed front libraries are the agent's")
}

func clock(f Facts) []api.Finding {
	const check = "clock"
	c := f.Clock
	skew := c.Skew.Abs().Round(time.Second)
	direction := "ahead of"
	if c.Skew < 0 {
		direction = "behind"
	}
	what := fmt.Sprintf("the node's clock is %s %s the API server's", skew, direction)
	switch {
	case c.Unknown:
		return ok(check, "", "the clock wasn't compared: no API server was asked")
	case c.Fault != "":
		return warn(check, "", "the clock can't be compared with the API server's: "+c.Fault, "", "")
	case skew >= skewRefused:
		return fail(check, "", what, "certificates seem to be not valid yet, or any more", "timedatectl set-ntp true")
	case skew >= skewNoted:
		return warn(check, "", what, "carve compares no clocks of different machines, so cards stay served; events and logs of this node stand in the wrong order", "timedatectl set-ntp true")
	}
	return ok(check, "", "the node's clock agrees with the API server's")
}
