package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sort"
	"strconv"
	"strings"
)

// ResizeVersion is the version of the formats of Resize and ResizeResult. Both
// are read strictly: a field that a reader doesn't know changes what is asked.
const ResizeVersion = 1

const (
	// maxResizeBytes bounds what is read: 64 containers with long names.
	maxResizeBytes = 8 << 10
	// MaxResizeMessage bounds the message of a result, in bytes.
	MaxResizeMessage = 1 << 10
	// MaxResizeID bounds the name that a caller gives to a resize.
	MaxResizeID = 64

	maxResizeContainers = 64
)

// Resize asks for other amounts for containers of a running pod. It is written
// by users who may update pods/resize of the pod, and taken away by the
// extender in the write that answers it.
type Resize struct {
	Version int `json:"v"`
	// ID is the caller's choice, a new one for each resize: the answer carries
	// it, and a request whose id was answered is dropped.
	ID string `json:"id"`
	// Containers are those to change. Others stay as they are.
	Containers map[string]ResizeAmounts `json:"containers"`
}

// ResizeAmounts are what one container shall have of each of its cards. An
// amount that is absent stays as it is; at least one is there.
type ResizeAmounts struct {
	MemMiB *int64 `json:"memMiB,omitempty"` // 1 to MaxMemoryMiB
	Cores  *int   `json:"cores,omitempty"`  // percent, 0 to 100; 0: no share of its own
}

// Outcomes of a resize.
const (
	ResizeGranted = "granted"
	ResizeRefused = "refused"
)

// ResizeResult is the extender's answer to a Resize. A granted one is in force
// once the node reports its generation; if the node can't put it in force, the
// extender takes it back and the result of the same id turns into refused.
type ResizeResult struct {
	Version int `json:"v"`
	// ID is the request's; empty where the request's couldn't be read.
	ID      string `json:"id,omitempty"`
	Outcome string `json:"outcome"` // granted or refused
	// Generation is the grant's after the answer; 0 where the pod has none.
	Generation int `json:"gen,omitempty"`
	// Message says in a sentence why a resize was refused.
	Message string `json:"message,omitempty"`
}

// ErrNoResize says that a pod carries no request, or no result.
var ErrNoResize = errors.New("the pod carries no resize")

// Encode writes the request as the annotation's value; it is the same for
// equal requests. It is an error to encode what Validate refuses.
func (r Resize) Encode() (string, error) { return encodeResize("resize", r, r.Validate()) }

// Encode writes the result as the annotation's value.
func (r ResizeResult) Encode() (string, error) {
	return encodeResize("result of a resize", r, r.Validate())
}

func encodeResize(what string, v any, fault error) (string, error) {
	if fault != nil {
		return "", fmt.Errorf("encode %s: %w", what, fault)
	}
	b, err := json.Marshal(v)
	if err == nil && len(b) > maxResizeBytes {
		err = fmt.Errorf("%d bytes, allowed are %d", len(b), maxResizeBytes)
	}
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", what, err)
	}
	return string(b), nil
}

// DecodeResize reads a request. An empty string is ErrNoResize; an impossible
// value is a *FieldError. Where the request can't be used but its id can be
// read, the id is returned with the error, so that the caller can be answered.
func DecodeResize(s string) (Resize, error) {
	var r Resize
	err := decodeStrictly(s, &r)
	if err == nil {
		err = r.Validate()
	}
	if err == nil {
		return r, nil
	}
	if errors.Is(err, ErrNoResize) {
		return Resize{}, err
	}
	var id struct {
		ID string `json:"id"`
	}
	if len(s) <= maxResizeBytes && json.Unmarshal([]byte(s), &id) == nil && validResizeID(id.ID) {
		return Resize{ID: id.ID}, fmt.Errorf("decode resize: %w", err)
	}
	return Resize{}, fmt.Errorf("decode resize: %w", err)
}

// DecodeResizeResult reads a result. An empty string is ErrNoResize.
func DecodeResizeResult(s string) (ResizeResult, error) {
	var r ResizeResult
	err := decodeStrictly(s, &r)
	if err == nil {
		err = r.Validate()
	}
	switch {
	case errors.Is(err, ErrNoResize):
		return ResizeResult{}, err
	case err != nil:
		return ResizeResult{}, fmt.Errorf("decode result of a resize: %w", err)
	}
	return r, nil
}

// decodeStrictly reads one JSON object with no fields but known ones.
func decodeStrictly(s string, into any) error {
	if s == "" {
		return ErrNoResize
	}
	if len(s) > maxResizeBytes {
		return fmt.Errorf("%d bytes, allowed are %d", len(s), maxResizeBytes)
	}
	d := json.NewDecoder(bytes.NewReader([]byte(s)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is something after the object")
	}
	return nil
}

// Validate checks form and ranges. The error is a *FieldError.
func (r Resize) Validate() error {
	switch {
	case r.Version != ResizeVersion:
		return &FieldError{"v", strconv.Itoa(r.Version), strconv.Itoa(ResizeVersion)}
	case !validResizeID(r.ID):
		return &FieldError{"id", r.ID, fmt.Sprintf("1 to %d letters, digits, dots, hyphens and underscores", MaxResizeID)}
	case len(r.Containers) == 0 || len(r.Containers) > maxResizeContainers:
		return &FieldError{"containers", fmt.Sprintf("%d of them", len(r.Containers)), fmt.Sprintf("1 to %d containers", maxResizeContainers)}
	}
	for _, name := range r.Names() {
		if err := r.Containers[name].validate(name); err != nil {
			return err
		}
	}
	return nil
}

// Names are the containers that change, in alphabetical order.
func (r Resize) Names() []string {
	names := make([]string, 0, len(r.Containers))
	for name := range r.Containers {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

func (a ResizeAmounts) validate(container string) error {
	field := func(f string) string { return "containers." + clip(container) + "." + f }
	switch {
	case container == "" || len(container) > 63:
		return &FieldError{"containers", container, "a container's name"}
	case a.MemMiB == nil && a.Cores == nil:
		return &FieldError{"containers." + clip(container), "{}", "memMiB, cores or both"}
	case a.MemMiB != nil && (*a.MemMiB < 1 || *a.MemMiB > MaxMemoryMiB):
		return &FieldError{field("memMiB"), strconv.FormatInt(*a.MemMiB, 10), fmt.Sprintf("1 to %d MiB on each of its cards", MaxMemoryMiB)}
	case a.Cores != nil && (*a.Cores < 0 || *a.Cores > 100):
		return &FieldError{field("cores"), strconv.Itoa(*a.Cores), "0 to 100 percent of each of its cards"}
	}
	return nil
}

// Validate checks form and ranges. The error is a *FieldError.
func (r ResizeResult) Validate() error {
	switch {
	case r.Version != ResizeVersion:
		return &FieldError{"v", strconv.Itoa(r.Version), strconv.Itoa(ResizeVersion)}
	case r.ID != "" && !validResizeID(r.ID):
		return &FieldError{"id", r.ID, fmt.Sprintf("up to %d letters, digits, dots, hyphens and underscores", MaxResizeID)}
	case r.Outcome != ResizeGranted && r.Outcome != ResizeRefused:
		return &FieldError{"outcome", r.Outcome, ResizeGranted + ", " + ResizeRefused}
	case r.Generation < 0:
		return &FieldError{"gen", strconv.Itoa(r.Generation), "0 and up"}
	case len(r.Message) > MaxResizeMessage:
		return &FieldError{"message", r.Message, fmt.Sprintf("up to %d bytes", MaxResizeMessage)}
	case r.Outcome == ResizeGranted && (r.ID == "" || r.Generation == 0):
		return &FieldError{"outcome", r.Outcome, "granted with an id and a generation only"}
	}
	return nil
}

func validResizeID(s string) bool {
	if s == "" || len(s) > MaxResizeID {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}
