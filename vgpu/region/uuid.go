package region

import (
	"encoding/hex"
	"fmt"
	"strings"
)

// UUID names a card or a MIG instance by the 16 bytes that the driver gives for it. NVML's text forms
// "GPU-…" and "MIG-…" hold the same bytes in hexadecimal.
type UUID [16]byte

// ParseUUID reads "GPU-" or "MIG-" followed by 8-4-4-4-12 hexadecimal digits, or the digits alone. The
// older form "MIG-GPU-<uuid>/<gi>/<ci>" names an instance by numbers that aren't in the driver's 16 bytes
// and is refused.
func ParseUUID(text string) (UUID, error) {
	var id UUID
	digits := text
	if rest, ok := strings.CutPrefix(digits, "GPU-"); ok {
		digits = rest
	} else if rest, ok := strings.CutPrefix(digits, "MIG-"); ok {
		digits = rest
	}
	if len(digits) != 36 || digits[8] != '-' || digits[13] != '-' || digits[18] != '-' || digits[23] != '-' {
		return id, fmt.Errorf("parse card UUID %q: want GPU- or MIG- and 8-4-4-4-12 hexadecimal digits", text)
	}
	plain := digits[:8] + digits[9:13] + digits[14:18] + digits[19:23] + digits[24:]
	if _, err := hex.Decode(id[:], []byte(plain)); err != nil {
		return UUID{}, fmt.Errorf("parse card UUID %q: %w", text, err)
	}
	return id, nil
}

// String gives the card form, "GPU-" and the digits. The bytes don't tell a card from a MIG instance.
func (id UUID) String() string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:16])
}
