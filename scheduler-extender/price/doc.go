// Package price says what room on a card is worth: the prices of slots, by what pods ask of
// late, and from them the value of whatever is left of a card. It is pure and deterministic:
// the same pods in the same order give the same tables, byte for byte, on every machine.
//
// A card's room can be cut into slots in many ways ("470+470+50", "650+320"). The linear
// program that serves all pods with the fewest cards has a price for each slot as its dual:
// the most valuable way to fill a card costs one card, a slot that fits nowhere else's rest
// costs as much as the card. A pod is well placed where a card loses no more value than the
// pod's own price.
//
// Start reading at Cut, which makes tables, and Mix, which remembers what pods asked.
package price
