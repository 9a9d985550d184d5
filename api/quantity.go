package api

import (
	"fmt"
	"math/bits"
	"strings"
)

// MiB is one mebibyte in bytes.
const MiB = 1 << 20

// MaxMemoryMiB is the largest memory that is taken for a card's: 16 TiB. It is
// far above any card and keeps every later sum inside int64.
const MaxMemoryMiB = 16 << 20

// quantity is an integer Kubernetes quantity: its value and whether it was
// written in binary form (Ki, Mi, Gi, …).
type quantity struct {
	value  int64
	binary bool
}

var decimalSuffix = map[string]uint64{"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}

var binarySuffix = map[string]uint{"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}

// parseQuantity reads the forms in which the API server hands out an extended
// resource: an integer with a decimal or binary suffix, or with a decimal
// exponent. Fractions and negative numbers are errors, since extended
// resources are whole. Source of the grammar: apimachinery's
// pkg/api/resource/quantity.go.
func parseQuantity(s string) (quantity, error) {
	digits := 0
	for digits < len(s) && s[digits] >= '0' && s[digits] <= '9' {
		digits++
	}
	if digits == 0 {
		return quantity{}, fmt.Errorf("%q is not a whole number of zero or more", clip(s))
	}
	var v uint64
	for i := 0; i < digits; i++ {
		hi, lo := bits.Mul64(v, 10)
		d := uint64(s[i] - '0')
		if hi != 0 || lo+d < lo {
			return quantity{}, fmt.Errorf("%q is too large", clip(s))
		}
		v = lo + d
	}
	suffix := s[digits:]
	scale, binary := uint64(1), false
	switch {
	case len(suffix) > 1 && (suffix[0] == 'e' || suffix[0] == 'E'):
		e, err := exponent(suffix[1:])
		if err != nil {
			return quantity{}, fmt.Errorf("%q is not a whole number: %w", clip(s), err)
		}
		for range e {
			scale *= 10
		}
	case strings.HasPrefix(suffix, "."):
		return quantity{}, fmt.Errorf("%q has a fraction: whole numbers only (1536Mi for 1.5Gi)", clip(s))
	case strings.HasSuffix(suffix, "i"):
		shift, ok := binarySuffix[suffix]
		if !ok {
			return quantity{}, fmt.Errorf("%q has an unknown unit", clip(s))
		}
		scale, binary = 1<<shift, true
	default:
		f, ok := decimalSuffix[suffix]
		if !ok {
			return quantity{}, fmt.Errorf("%q is not a whole number with a known unit", clip(s))
		}
		scale = f
	}
	hi, lo := bits.Mul64(v, scale)
	if hi != 0 || lo > 1<<63-1 {
		return quantity{}, fmt.Errorf("%q is too large", clip(s))
	}
	return quantity{int64(lo), binary}, nil
}

// exponent reads 0..18 with an optional plus sign.
func exponent(s string) (int, error) {
	s = strings.TrimPrefix(s, "+")
	if s == "" || len(s) > 2 {
		return 0, fmt.Errorf("bad exponent %q", clip(s))
	}
	e := 0
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return 0, fmt.Errorf("bad exponent %q", clip(s))
		}
		e = e*10 + int(c-'0')
	}
	if e > 18 {
		return 0, fmt.Errorf("exponent %d is too large", e)
	}
	return e, nil
}

// ParseMemoryMiB reads a nvidia.com/gpumem quantity. The unit follows the
// written form: 8000, 8k and 8e3 are 8000 MiB, while 8Gi is a number of bytes,
// so 8192 MiB (rounded up to a whole MiB). Zero means "not asked".
func ParseMemoryMiB(s string) (int64, error) {
	q, err := parseQuantity(s)
	if err != nil {
		return 0, err
	}
	v := q.value
	if q.binary {
		v = v/MiB + (v%MiB+MiB-1)/MiB
	}
	if v > MaxMemoryMiB {
		return 0, fmt.Errorf("%q is %d MiB, more than any card has (a decimal number counts MiB; write 8Gi for bytes)", clip(s), v)
	}
	return v, nil
}

// clip bounds foreign text in messages.
func clip(s string) string {
	if len(s) > 40 {
		return s[:40] + "…"
	}
	return s
}
