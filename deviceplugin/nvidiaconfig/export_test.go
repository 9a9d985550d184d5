package nvidiaconfig

// NewWatcher makes what tells of changes of files.
var NewWatcher = &newWatcher
