// Package monitor shows a node: metrics for Prometheus, and whether the agent
// lives and is ready.
//
// Collection is pulled: nothing is read while nobody asks, and what was read is
// kept for a second, so that ten scrapers cost as much as one. Each collector
// has a file of its own. A reading that fails leaves its series out and never
// fails the page.
//
// Start reading at Handler.
package monitor
