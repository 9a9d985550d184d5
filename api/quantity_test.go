package api_test

import (
	"math/big"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
)

func TestParseMemoryMiB(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want int64
		bad  bool
	}{
		"a decimal number counts MiB":         {"8000", 8000, false},
		"as the API server stores it":         {"8k", 8000, false},
		"with an exponent":                    {"8e3", 8000, false},
		"with a capital exponent and a sign":  {"8E+3", 8000, false},
		"binary counts bytes":                 {"8Gi", 8192, false},
		"10 GiB":                              {"10Gi", 10240, false},
		"part of a MiB is rounded up":         {"1025Ki", 2, false},
		"one KiB is one MiB":                  {"1Ki", 1, false},
		"zero is not asked":                   {"0", 0, false},
		"zero in bytes":                       {"0Gi", 0, false},
		"leading zeros":                       {"0008000", 8000, false},
		"the largest card":                    {"16777216", 16777216, false},
		"above any card":                      {"16777217", 0, true},
		"bytes written without a unit":        {"8589934592", 0, true},
		"above any card, binary":              {"17Ti", 0, true},
		"a fraction":                          {"0.5", 0, true},
		"milli":                               {"500m", 0, true},
		"negative":                            {"-1", 0, true},
		"signed":                              {"+1", 0, true},
		"empty":                               {"", 0, true},
		"a unit alone":                        {"Gi", 0, true},
		"an unknown unit":                     {"8GB", 0, true},
		"an unknown binary unit":              {"8Xi", 0, true},
		"a space":                             {"8 Gi", 0, true},
		"a number beyond 64 bits":             {"99999999999999999999999", 0, true},
		"64 bits overflowed to a small one":   {"18446744073709551617", 0, true},
		"a product beyond 64 bits":            {"9223372036854775807Ei", 0, true},
		"an exponent that is too large":       {"1e19", 0, true},
		"an exponent without digits":          {"1e", 0, true},
		"a negative exponent":                 {"8000e-1", 0, true},
		"exa is a unit where nothing follows": {"1E", 0, true}, // 10^18 MiB
	} {
		t.Run(name, func(t *testing.T) {
			got, err := api.ParseMemoryMiB(c.in)
			if (err != nil) != c.bad || got != c.want {
				t.Fatalf("%q is %d, %v; want %d", c.in, got, err, c.want)
			}
		})
	}
}

// exact is the value of a whole quantity in arbitrary precision, an independent
// reading of the grammar; ok is false where the form is not one that is taken.
func exact(s string) (value *big.Int, binary, ok bool) {
	digits := strings.TrimLeft(s, "0123456789")
	number, suffix := s[:len(s)-len(digits)], digits
	v, good := new(big.Int).SetString(number, 10)
	if !good {
		return nil, false, false
	}
	pow := func(base, exp int64) *big.Int { return new(big.Int).Exp(big.NewInt(base), big.NewInt(exp), nil) }
	for i, u := range []string{"Ki", "Mi", "Gi", "Ti", "Pi", "Ei"} {
		if suffix == u {
			return v.Mul(v, pow(1024, int64(i+1))), true, true
		}
	}
	for i, u := range []string{"", "k", "M", "G", "T", "P", "E"} {
		if suffix == u {
			return v.Mul(v, pow(1000, int64(i))), false, true
		}
	}
	if len(suffix) > 1 && strings.ContainsAny(suffix[:1], "eE") {
		e, good := new(big.Int).SetString(strings.TrimPrefix(suffix[1:], "+"), 10)
		if good && e.Sign() >= 0 && e.Cmp(big.NewInt(18)) <= 0 && !strings.ContainsAny(suffix[1:], "_-") {
			return v.Mul(v, pow(10, e.Int64())), false, true
		}
	}
	return nil, false, false
}

func FuzzParseMemoryMiB(f *testing.F) {
	for _, s := range []string{"8000", "8k", "8Gi", "1025Ki", "8e3", "1E", "18446744073709551616", "-1", "0.5", "", "Gi", "1e+18", "17Ti", "16Ti"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := api.ParseMemoryMiB(s)
		v, binary, ok := exact(s)
		if ok && binary {
			v.Add(v, big.NewInt(api.MiB-1)).Div(v, big.NewInt(api.MiB))
		}
		fits := ok && v.Cmp(big.NewInt(16<<20)) <= 0
		switch {
		case err == nil && (!fits || v.Cmp(big.NewInt(got)) != 0):
			t.Fatalf("%q is %d, exactly %v", s, got, v)
		case err != nil && got != 0:
			t.Fatalf("%q: %d beside an error", s, got)
		case err != nil && fits && len(s) < 30 && !strings.HasPrefix(strings.TrimLeft(s, "0123456789"), "e") && !strings.HasPrefix(strings.TrimLeft(s, "0123456789"), "E"):
			// The value before the unit may be too large to be read.
			if b, _, _ := exact(strings.TrimRight(s, "kMGTPEi")); b == nil || b.IsInt64() {
				t.Fatalf("%q was refused: %v", s, err)
			}
		}
	})
}
