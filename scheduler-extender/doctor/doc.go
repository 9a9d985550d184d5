// Package doctor says what is wrong with carve in a cluster: what is missing or
// differs from what this version installs, which nodes aren't served and why,
// and what of other GPU software is in the way.
//
// Gather reads the cluster with the caller's rights and changes nothing; Check
// is pure and judges what was read. What may not be read is a finding, not an
// end.
//
// Start reading at Facts and Check.
package doctor
