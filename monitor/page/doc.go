// Package page is the live page: cards, who holds which part of them and what
// they use, as HTML, as JSON and as a stream of changes.
//
// It only reads. What it shows comes from a Source; nothing is read while nobody
// looks, and what was read is kept for a second, so that ten viewers cost as
// much as one. The page is a few embedded files that load nothing from elsewhere
// and put foreign text into the document as text only.
//
// Start reading at Handler.
package page
