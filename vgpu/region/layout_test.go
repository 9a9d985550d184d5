package region

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The Go numbers are the C header's, which is compiled here. gcc is a requirement of the build.
func TestEveryNumberIsTheHeaders(t *testing.T) {
	type number struct {
		c    string
		want uint64
	}
	at := func(typ, field string, want int) number {
		return number{fmt.Sprintf("offsetof(struct %s, %s)", typ, field), uint64(want)}
	}
	size := func(typ string, want int) number { return number{"sizeof(struct " + typ + ")", uint64(want)} }
	numbers := []number{
		{"CARVE_ABI", ABI}, {"CARVE_MAX_CARDS", MaxCards}, {"CARVE_MAX_SLOTS", MaxSlots},
		{"CARVE_UNIT_BYTES", UnitBytes}, {"CARVE_UNIT_SHIFT", unitShift},
		{"CARVE_LIMITS_SIZE", LimitsBytes}, {"CARVE_USAGE_SIZE", UsageBytes},
		{"CARVE_LIMITS_MAGIC", limitsMagic}, {"CARVE_USAGE_MAGIC", usageMagic},
		{"CARVE_CARD_COMPUTE_FIXED", cardComputeFixed},
		{"CARVE_CARD_MANAGED_COUNT", cardManagedCount}, {"CARVE_CARD_MANAGED_FORBID", cardManagedForbid},
		{"CARVE_CARD_OVERSELL", cardOversell}, {"CARVE_LIMITS_SELF_VISIBLE", limitsSelfVisible},
		{"CARVE_SLOT_FREE", uint64(SlotFree)}, {"CARVE_SLOT_CLAIMING", uint64(SlotClaiming)},
		{"CARVE_SLOT_LIVE", uint64(SlotLive)}, {"CARVE_SLOT_DYING", uint64(SlotDying)},
		{"CARVE_SLOT_DEAD", uint64(SlotDead)},
		{"CARVE_STATE_PID(3, 7)", 3 | 7<<32}, {"CARVE_CHARGE(5, 6)", 5<<32 | 6},
		{"CARVE_GATE_OPEN", 0}, {"CARVE_GATE_CLOSED", 1},

		size("carve_limits", LimitsBytes),
		at("carve_limits", "magic", limitsMagicAt), at("carve_limits", "abi", limitsABIAt),
		at("carve_limits", "size", limitsSizeAt), at("carve_limits", "generation", limitsGenerationAt),
		at("carve_limits", "banks", limitsBanksAt), at("carve_limits", "live", limitsLiveAt),

		size("carve_limits_bank", bankBytes),
		at("carve_limits_bank", "generation", bankGenerationAt), at("carve_limits_bank", "checksum", bankChecksumAt),
		at("carve_limits_bank", "card_count", bankCardCountAt), at("carve_limits_bank", "flags", bankFlagsAt),
		at("carve_limits_bank", "cards", bankCardsAt),

		size("carve_limits_card", cardBytes),
		at("carve_limits_card", "uuid", cardUUIDAt), at("carve_limits_card", "limit_bytes", cardLimitAt),
		at("carve_limits_card", "context_bytes", cardContextAt), at("carve_limits_card", "compute_ppm", cardComputePPMAt),
		at("carve_limits_card", "flags", cardFlagsAt), at("carve_limits_card", "priority", cardPriorityAt),
		at("carve_limits_card", "mps_percent", cardMPSPercentAt), at("carve_limits_card", "multiprocessors", cardProcessorsAt),

		size("carve_limits_live", liveBytes),
		at("carve_limits_live", "residual_bytes", liveResidualAt),
		at("carve_limits_live", "residual_sequence", liveResidualSequenceAt),
		at("carve_limits_live", "gate", liveGateAt), at("carve_limits_live", "busy_contexts", liveBusyContextsAt),
		at("carve_limits_live", "calibration_ppm", liveCalibrationAt),

		size("carve_usage", UsageBytes),
		at("carve_usage", "magic", usageMagicAt), at("carve_usage", "abi", usageABIAt),
		at("carve_usage", "size", usageSizeAt), at("carve_usage", "slot_count", usageSlotCountAt),
		at("carve_usage", "card_count", usageCardCountAt), at("carve_usage", "high_water", usageHighWaterAt),
		at("carve_usage", "reserved_page", usageHeaderBytes),
		at("carve_usage", "processes", usageProcesses), at("carve_usage", "lines", usageLines),
		{"sizeof(((struct carve_usage *)0)->lines[0])", usageColumnBytes},

		size("carve_process", processBytes),
		at("carve_process", "state_pid", processStatePIDAt), at("carve_process", "start_ticks", processStartTicksAt),
		at("carve_process", "pid_namespace", processPIDNamespaceAt), at("carve_process", "image", processImageAt),
		at("carve_process", "library_abi", processLibraryABIAt),

		size("carve_usage_line", lineBytes),
		at("carve_usage_line", "charge", lineChargeAt), at("carve_usage_line", "sequence", lineSequenceAt),
		at("carve_usage_line", "context_bytes", lineContextAt), at("carve_usage_line", "managed_bytes", lineManagedAt),
		at("carve_usage_line", "allocations", lineAllocationsAt), at("carve_usage_line", "refusals", lineRefusalsAt),
		at("carve_usage_line", "last_refused_bytes", lineLastRefusedAt), at("carve_usage_line", "peak_bytes", linePeakAt),
		at("carve_usage_line", "uncharged_bytes", lineUnchargedAt), at("carve_usage_line", "imported_bytes", lineImportedAt),

		at("carve_limits", "compute", limitsComputeAt), {"CARVE_COMPUTE_AT", computeAt},
		size("carve_compute_card", computeCardBytes),
		at("carve_compute_card", "heartbeat_ns", computeHeartbeatAt), at("carve_compute_card", "truth_ns", computeTruthAt),
		at("carve_compute_card", "ahead_ns", computeAheadAt), at("carve_compute_card", "container_ppm", computeContainerAt), at("carve_compute_card", "pace", computePaceAt),
		at("carve_compute_card", "terms", computeTermsAt),
		at("carve_pace", "count", paceCountAt), at("carve_pace", "contexts", paceContextsAt), at("carve_pace", "most", paceMostAt),
		at("carve_pace", "points", pacePointsAt), {"CARVE_PACE_POINTS", pacePoints}, size("carve_pace_point", pacePointBytes),
		size("carve_compute_terms", termsBytes), at("carve_compute_terms", "correction_ns", termsCorrectionAt),
		at("carve_compute_terms", "share_ppm", termsShareAt), at("carve_compute_terms", "flags", termsFlagsAt),
		{"CARVE_TERMS_GATE", termsGate}, {"CARVE_TERMS_BORROW", termsBorrow}, {"CARVE_TERMS_OWNER", termsOwner}, {"CARVE_GATE_TURN", uint64(GateTurn)},
		{"carve_terms_owner(7, 5, 0x80000001)", uint64(Owner{PID: 7, StartTicks: 5, Image: 0x80000001}.tag())},
		{"carve_terms_owner(-1, 0x123456789abcdef0, -1)", uint64(Owner{PID: 1<<32 - 1, StartTicks: 0x123456789abcdef0, Image: 1<<64 - 1}.tag())},
		{"carve_terms_owner(0, 0, 0)", uint64(Owner{}.tag())},
		at("carve_usage_line", "compute_sequence", lineComputeSequenceAt), at("carve_usage_line", "charged_ns", lineChargedAt),
		at("carve_usage_line", "since_ns", lineSinceAt), at("carve_usage_line", "committed_ns", lineCommittedAt),
		at("carve_usage_line", "credit_ns", lineCreditAt), at("carve_usage_line", "credit_at_ns", lineCreditTimeAt),
		{"CARVE_COMPUTE_WAITING", computeWaiting},
	}

	var src strings.Builder
	src.WriteString("#include <stdio.h>\n#include \"carve_region.h\"\nint main(void) {\n")
	for _, n := range numbers {
		fmt.Fprintf(&src, "    printf(\"%%llu\\n\", (unsigned long long)(%s));\n", n.c)
	}
	src.WriteString("    printf(\"%s\\n%s\\n\", CARVE_LIMITS_PATH, CARVE_USAGE_PATH);\n    return 0;\n}\n")
	dir := t.TempDir()
	file, program := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(file, []byte(src.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", "../lib/include", "-o", program, file)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != len(numbers)+2 {
		t.Fatalf("%d lines from the C program, want %d", len(lines), len(numbers)+2)
	}
	for i, n := range numbers {
		if want := fmt.Sprint(n.want); lines[i] != want {
			t.Errorf("%s is %s in C and %s here", n.c, lines[i], want)
		}
	}
	for i, want := range []string{ContainerLimitsPath, ContainerUsagePath} {
		if got := lines[len(numbers)+i]; got != want {
			t.Errorf("path %s in C, %s here", got, want)
		}
	}
}
