package api

// Finding is what one check of doctor has to say about one object or file.
type Finding struct {
	// Check is the check's name, the same in every version.
	Check string `json:"check"`
	// Level is ok, warn or fail.
	Level Level `json:"level"`
	// Where names the node, object or file.
	Where string `json:"where"`
	// What says in a sentence what was found.
	What string `json:"what"`
	// Why says what it harms; empty where all is well.
	Why string `json:"why,omitempty"`
	// Do is the command or the text of a configuration that mends it.
	Do string `json:"do,omitempty"`
}

// Level is how bad a finding is.
type Level string

// Levels of findings.
const (
	// LevelOK: as it should be.
	LevelOK Level = "ok"
	// LevelWarn: it works, and somebody should know.
	LevelWarn Level = "warn"
	// LevelFail: cards aren't served, or are handed out past carve.
	LevelFail Level = "fail"
)

// Worst is the worst level among findings, ok if there are none.
func Worst(findings []Finding) Level {
	worst := LevelOK
	for _, f := range findings {
		if f.Level == LevelFail {
			return LevelFail
		}
		if f.Level == LevelWarn {
			worst = LevelWarn
		}
	}
	return worst
}
