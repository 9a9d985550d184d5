package sim

// Model is a kind of card.
type Model struct {
	// Name is what the driver calls it.
	Name string
	// PhysicalMiB is the card's memory, ReservedMiB what the driver keeps of it.
	PhysicalMiB, ReservedMiB int64
	// MIG says that the card has a MIG mode; it is off.
	MIG bool
}

// MemoryMiB is what can be handed out.
func (m Model) MemoryMiB() int64 { return m.PhysicalMiB - m.ReservedMiB }

// Models are those of the software GPU, by the same keys and with the same
// memory (vgpu/soft/state/models.c).
var Models = map[string]Model{
	"a100-80":    {"NVIDIA A100-SXM4-80GB", 81920, 870, true},
	"a30":        {"NVIDIA A30", 24576, 512, true},
	"h100":       {"NVIDIA H100 80GB HBM3", 81559, 551, true},
	"h200":       {"NVIDIA H200", 143771, 699, true},
	"b200":       {"NVIDIA B200", 183359, 729, true},
	"rtxpro6000": {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 639, true},
	"l20":        {"NVIDIA L20", 46068, 602, false},
	"4090":       {"NVIDIA GeForce RTX 4090", 24564, 348, false},
	"t4":         {"Tesla T4", 15360, 430, false},
}

// Same returns n cards of one model.
func Same(n int, m Model) []Model {
	out := make([]Model, n)
	for i := range out {
		out[i] = m
	}
	return out
}
