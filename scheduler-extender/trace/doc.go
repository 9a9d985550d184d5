// Package trace gives each request to the extender an id, by which its lines in
// the log are found together.
//
// A caller that traces sends its own in a traceparent header of W3C Trace
// Context, and that id is used; else one is drawn.
package trace
