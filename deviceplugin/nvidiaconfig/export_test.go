package nvidiaconfig

import "time"

// NewWatcher makes what tells of changes of files.
var NewWatcher = &newWatcher

// SetGrace sets how long a file may be gone; before Run.
func (f *Follower) SetGrace(d time.Duration) { f.grace = d }
