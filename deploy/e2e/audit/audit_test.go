package audit

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const (
	card0, card1 = "GPU-0", "GPU-1"
	a, b, w      = "uid-a", "uid-b", "uid-w"
	gib          = 1 << 30
)

func grantOf(uid string, containers map[string][]api.CardGrant) *api.Grant {
	return &api.Grant{Version: api.GrantVersion, UID: uid, Node: "n", Generation: 1, Containers: containers}
}

func share(card string, mem int64, cores int) []api.CardGrant {
	return []api.CardGrant{{Card: card, MemMiB: mem, Cores: cores, Mode: api.ModeVGPU}}
}

func slice(uid, container string, mem int64, cores int32) v1alpha1.Slice {
	return v1alpha1.Slice{PodUID: uid, Container: container, MemMiB: mem, Cores: cores, Mode: "vgpu", Generation: 1, State: v1alpha1.Active}
}

// whole is a node on which all agree: pod a with an init container that is done
// and an app container on card 0, pod b beside it, pod w with card 1 whole, a
// pod without a card, and a pod that is over and keeps its dead container.
func whole() Snapshot {
	ga := grantOf(a, map[string][]api.CardGrant{"warm": share(card0, 9000, 0), "app": share(card0, 8000, 30)})
	gb := grantOf(b, map[string][]api.CardGrant{"app": share(card0, 16000, 0)})
	gw := grantOf(w, map[string][]api.CardGrant{"app": {{Card: card1, Mode: api.ModeExclusive}}})
	la, lw := Limits{card0: {8000, 30}}, Limits{card0: {9000, 0}}
	lb := Limits{card0: {16000, 0}}
	app := []PodContainer{{"app", api.App}}
	return Snapshot{
		Hook: true,
		Pods: []Pod{
			{UID: a, Name: "a", Grant: ga, Containers: []PodContainer{{"warm", api.Init}, {"app", api.App}}, Done: map[string]bool{"warm": true}},
			{UID: b, Name: "b", Grant: gb, Containers: app},
			{UID: w, Name: "w", Grant: gw, Containers: app},
			{UID: "uid-plain", Name: "plain", Containers: app},
			{UID: "uid-over", Name: "over", Over: true, Grant: grantOf("uid-over", map[string][]api.CardGrant{"app": share(card0, 70000, 0)}), Containers: app},
		},
		Cards: []v1alpha1.Card{
			{UUID: card0, MemoryMiB: 81000, Slices: []v1alpha1.Slice{slice(a, "app", 8000, 30), slice(b, "app", 16000, 0)}},
			{UUID: card1, MemoryMiB: 81000, Slices: []v1alpha1.Slice{{PodUID: w, Container: "app", Mode: "exclusive", Generation: 1, State: v1alpha1.Active}}},
		},
		Files: []Files{
			{UID: a, Container: "warm", Limits: lw, Inode: 1},
			{UID: a, Container: "app", Limits: la, Inode: 2, ChargedBytes: map[string]uint64{card0: 2 * gib}},
			{UID: b, Container: "app", Limits: lb, Inode: 3, ChargedBytes: map[string]uint64{card0: 0}},
		},
		Journal: []Record{{UID: a, State: "held", Grant: *ga}, {UID: b, State: "held", Grant: *gb}, {UID: w, State: "held", Grant: *gw}},
		Containers: []Container{
			{ID: "ka", UID: a, Name: "app", Running: true, Limits: la, Inode: 2, Cards: []string{card0}},
			{ID: "kb", UID: b, Name: "app", Running: true, Limits: lb, Inode: 3, Cards: []string{card0}},
			{ID: "kw", UID: w, Name: "app", Running: true, Cards: []string{card1}},
			{ID: "kp", UID: "uid-plain", Name: "app", Running: true},
		},
		Driver: []DriverCard{
			{UUID: card0, UsedBytes: gib, Processes: []Process{{PID: 7, Bytes: gib, Container: "ka"}}},
			{UUID: card1},
		},
		Ledger:   Ledger{UsedMiB: 9000 + 16000 + 81000, Bound: 3},
		AgentMiB: map[string]int64{card0: 25000, card1: 81000},
	}
}

func TestNothingIsFoundWhereAllAgree(t *testing.T) {
	if f := Compare(whole()); !f.OK() || f.LeakedSlices+f.WrongLimits+f.DoubleBookings != 0 {
		t.Errorf("found %+v", f)
	}
}

func TestPodThatIsGoneAndStillRunsKeepsItsSlices(t *testing.T) {
	s := whole()
	s.Pods = slices.DeleteFunc(s.Pods, func(p Pod) bool { return p.UID == b })
	s.Ledger.Bound = 2
	if f := Compare(s); !f.OK() {
		t.Errorf("found %+v", f)
	}
	// Once it doesn't run any more, all that is left of it is leaked: report,
	// files and journal.
	s.Containers = slices.DeleteFunc(s.Containers, func(k Container) bool { return k.UID == b })
	if f := Compare(s); f.LeakedSlices != 3 {
		t.Errorf("found %+v", f)
	}
}

// TestEachFaultIsFound plants one fault after another.
func TestEachFaultIsFound(t *testing.T) {
	const leaked, wrong, double, other = "leaked slice", "wrong limits", "double booking", "differs"
	for name, c := range map[string]struct {
		plant func(*Snapshot)
		want  string
	}{
		"the hook is down":                     {func(s *Snapshot) { s.Hook = false }, other},
		"a container started without the hook": {func(s *Snapshot) { s.Unadjusted = 1 }, other},
		"a grant of another pod":               {func(s *Snapshot) { s.Pods[0].Grant.UID = b }, other},
		"a grant that can't be read":           {func(s *Snapshot) { s.Pods[0].GrantFault = "nonsense" }, other},
		"the report keeps a slice of a pod that is over": {func(s *Snapshot) {
			s.Cards[0].Slices = append(s.Cards[0].Slices, slice("uid-over", "app", 70000, 0))
		}, leaked},
		"the report keeps a slice of a pod that nobody knows": {func(s *Snapshot) {
			s.Cards[1].Slices = append(s.Cards[1].Slices, slice("uid-gone", "app", 100, 0))
		}, leaked},
		"the report has a slice on a card that wasn't granted": {func(s *Snapshot) {
			s.Cards[1].Slices = append(s.Cards[1].Slices, slice(a, "app", 8000, 30))
		}, leaked},
		"the report has a slice twice": {func(s *Snapshot) {
			s.Cards[0].Slices = append(s.Cards[0].Slices, slice(a, "app", 8000, 30))
		}, other},
		"the report has other memory":      {func(s *Snapshot) { s.Cards[0].Slices[0].MemMiB++ }, wrong},
		"the report has other cores":       {func(s *Snapshot) { s.Cards[0].Slices[0].Cores++ }, wrong},
		"the report has an old generation": {func(s *Snapshot) { s.Pods[0].Grant.Generation = 2 }, wrong},
		"the report says prepared of a container that runs": {func(s *Snapshot) {
			s.Cards[0].Slices[0].State = v1alpha1.Prepared
		}, other},
		"the report says active of a container that isn't there": {func(s *Snapshot) {
			s.Containers = s.Containers[1:]
			s.Driver[0] = DriverCard{UUID: card0}
			s.Files[1].ChargedBytes = nil
		}, other},
		"the report lacks a slice":       {func(s *Snapshot) { s.Cards[0].Slices = s.Cards[0].Slices[:1] }, other},
		"files of a pod that is over":    {func(s *Snapshot) { s.Files = append(s.Files, Files{UID: "uid-over", Container: "app"}) }, leaked},
		"files for a whole card":         {func(s *Snapshot) { s.Files = append(s.Files, Files{UID: w, Container: "app"}) }, leaked},
		"files are missing":              {func(s *Snapshot) { s.Files = s.Files[1:] }, other},
		"files that can't be read":       {func(s *Snapshot) { s.Files[0].Fault = "torn" }, other},
		"a limits file with more memory": {func(s *Snapshot) { s.Files[0].Limits = Limits{card0: {9001, 0}} }, wrong},
		"a journal record of a pod that is gone": {func(s *Snapshot) {
			s.Journal = append(s.Journal, Record{UID: "uid-gone", State: "held"})
		}, leaked},
		"a journal record that can't be read":     {func(s *Snapshot) { s.Journal[0].Fault = "torn" }, other},
		"a journal record that stays in release":  {func(s *Snapshot) { s.Journal[0].State = "releasing" }, other},
		"a journal record of another grant":       {func(s *Snapshot) { s.Journal[0].Grant.Generation = 9 }, wrong},
		"a journal record is missing":             {func(s *Snapshot) { s.Journal = s.Journal[1:] }, other},
		"a container maps someone else's limits":  {func(s *Snapshot) { s.Containers[0].Limits = s.Containers[1].Limits }, wrong},
		"a container maps a file that is no more": {func(s *Snapshot) { s.Containers[0].Inode = 99 }, wrong},
		"a container with a share without limits": {func(s *Snapshot) { s.Containers[0].Limits = nil }, wrong},
		"a container with another card":           {func(s *Snapshot) { s.Containers[0].Cards = []string{card1} }, wrong},
		"a container with a card too many":        {func(s *Snapshot) { s.Containers[0].Cards = []string{card0, card1} }, wrong},
		"a container with a share and no card":    {func(s *Snapshot) { s.Containers[0].Cards = nil }, wrong},
		"a container without a grant has a card":  {func(s *Snapshot) { s.Containers[3].Cards = []string{card0} }, wrong},
		"a container that can't be looked into":   {func(s *Snapshot) { s.Containers[0].Fault = "gone" }, other},
		"a dead process holds memory":             {func(s *Snapshot) { s.Driver[0].Processes[0].Ended = true }, leaked},
		"a process of no container holds memory":  {func(s *Snapshot) { s.Driver[0].Processes[0].Container = "" }, leaked},
		"memory of nobody":                        {func(s *Snapshot) { s.Driver[1].UsedBytes = 5 }, leaked},
		"a process on a card that wasn't granted": {func(s *Snapshot) {
			s.Driver[1] = DriverCard{UUID: card1, UsedBytes: 5, Processes: []Process{{PID: 7, Bytes: 5, Container: "ka"}}}
		}, wrong},
		"a container beyond its share": {func(s *Snapshot) {
			s.Driver[0].Processes[0].Bytes, s.Driver[0].UsedBytes = 8*gib, 8*gib
			s.Files[1].ChargedBytes[card0] = 8 * gib
		}, wrong},
		"less charged than held":              {func(s *Snapshot) { s.Files[1].ChargedBytes[card0] = gib - 1 }, wrong},
		"charged and nothing held":            {func(s *Snapshot) { s.Files[2].ChargedBytes[card0] = 1 }, leaked},
		"the agent counts otherwise":          {func(s *Snapshot) { s.AgentMiB[card0]-- }, other},
		"the ledger counts more":              {func(s *Snapshot) { s.Ledger.UsedMiB++ }, other},
		"the ledger has a debt":               {func(s *Snapshot) { s.Ledger.DebtMiB = 1 }, double},
		"the ledger lost a pod":               {func(s *Snapshot) { s.Ledger.Bound-- }, other},
		"the ledger keeps an offer":           {func(s *Snapshot) { s.Ledger.Offers++ }, other},
		"the ledger keeps a pod that is gone": {func(s *Snapshot) { s.Ledger.Releasing = 99 }, other},
		"more memory granted than there is":   {func(s *Snapshot) { s.Cards[0].MemoryMiB = 24999 }, double},
		"more compute granted than there is": {func(s *Snapshot) {
			s.Pods[1].Grant.Containers["app"][0].Cores = 71
		}, double},
		"a share on a card that is held whole": {func(s *Snapshot) {
			s.Pods[1].Grant.Containers["app"][0].Card = card1
		}, double},
		"an MPS server on a card of shares": {func(s *Snapshot) {
			s.Pods = append(s.Pods, Pod{UID: "k", Name: "carve-system/carve-mps-x"})
			s.Containers = append(s.Containers, Container{ID: "k1", UID: "k", Name: "mps"})
			s.Driver[0].Processes = append(s.Driver[0].Processes, Process{PID: 99, Container: "k1", Bytes: 1})
			s.Driver[0].UsedBytes++
		}, wrong},
		"a share in another mode than the card": {func(s *Snapshot) {
			s.Pods[1].Grant.Containers["app"][0].Mode = api.ModeTimeslice
		}, double},
		"a card held whole twice": {func(s *Snapshot) {
			s.Pods[1].Grant.Containers = map[string][]api.CardGrant{"app": {{Card: card1, Mode: api.ModeExclusive}}}
		}, double},
	} {
		t.Run(name, func(t *testing.T) {
			s := whole()
			c.plant(&s)
			f := Compare(s)
			if !slices.ContainsFunc(f.Lines, func(l string) bool { return strings.HasPrefix(l, c.want+": ") }) {
				t.Errorf("want a line of kind %q, found %+v", c.want, f)
			}
			counts := map[string]int{leaked: f.LeakedSlices, wrong: f.WrongLimits, double: f.DoubleBookings}
			if n, ok := counts[c.want]; ok && n == 0 {
				t.Errorf("want a count of kind %q, found %+v", c.want, f)
			}
		})
	}
}

func TestPeakOfAPod(t *testing.T) {
	g := *grantOf(a, map[string][]api.CardGrant{
		"init": share(card0, 50, 0), "side": share(card0, 20, 10), "late": share(card0, 60, 0), "app": share(card0, 30, 5), "app2": share(card0, 40, 0),
	})
	order := []PodContainer{{"init", api.Init}, {"side", api.Sidecar}, {"late", api.Init}, {"app", api.App}, {"app2", api.App}}
	if got, want := Peak(g, order, card0), (Amount{MemMiB: 90, Cores: 15, Pods: 1, Mode: "vgpu"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := Peak(g, order, card1); got != (Amount{}) {
		t.Errorf("of a card that it isn't on: %+v", got)
	}
	if got := Peak(g, order[:4], card0).MemMiB; got != 80 {
		t.Errorf("side and late: got %d, want 80", got)
	}
	if !maps.Equal(wantLimits(&g, "app"), Limits{card0: {30, 5}}) {
		t.Errorf("limits of app: %v", wantLimits(&g, "app"))
	}
}
