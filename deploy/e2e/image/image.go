package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"time"
)

const (
	mediaTypeIndex    = "application/vnd.oci.image.index.v1+json"
	mediaTypeManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaTypeConfig   = "application/vnd.oci.image.config.v1+json"
	mediaTypeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// Image is one image for this machine's architecture, to be written as an OCI
// layout. The zero value of every field but Ref is valid.
type Image struct {
	// Ref is the full name, registry host and tag included, under which the
	// image is found after an import, such as localhost/carve:dev.
	Ref string
	// Layers from the lowest to the uppermost.
	Layers []*Layer
	// Entrypoint and Cmd as in a Dockerfile's exec form.
	Entrypoint, Cmd []string
	// Env holds KEY=VALUE entries.
	Env []string
	// WorkingDir is absolute; empty means /.
	WorkingDir string
	// Labels of the image's configuration.
	Labels map[string]string
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type config struct {
	platform
	Config runConfig `json:"config"`
	RootFS rootFS    `json:"rootfs"`
}

type runConfig struct {
	Entrypoint []string          `json:"Entrypoint,omitempty"`
	Cmd        []string          `json:"Cmd,omitempty"`
	Env        []string          `json:"Env,omitempty"`
	WorkingDir string            `json:"WorkingDir,omitempty"`
	Labels     map[string]string `json:"Labels,omitempty"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

// blob is one file of blobs/sha256: either bytes, or a file on disk.
type blob struct {
	digest string
	size   int64
	data   []byte
	file   *os.File
}

// WriteFile writes the image to path as one tar. The file appears complete or
// not at all. The same Image over the same files gives the same bytes.
func (m Image) WriteFile(path string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp*")
	if err != nil {
		return fmt.Errorf("image %s: %w", m.Ref, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err = f.Chmod(0o644); err != nil {
		return fmt.Errorf("image %s: %w", m.Ref, err)
	}
	if err = m.Write(f); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return fmt.Errorf("image %s: %w", m.Ref, err)
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("image %s: %w", m.Ref, err)
	}
	return nil
}

// Write writes the image as a tar of an OCI image layout, with the annotation
// by which containerd's import names it. Layers are spooled to temporary files
// first, since their digest precedes them.
func (m Image) Write(w io.Writer) error {
	if err := m.write(w); err != nil {
		return fmt.Errorf("image %s: %w", m.Ref, err)
	}
	return nil
}

func (m Image) write(w io.Writer) error {
	if m.Ref == "" {
		return errors.New("no name: set Ref")
	}
	var blobs []blob
	defer func() {
		for _, b := range blobs {
			if b.file != nil {
				b.file.Close()
			}
		}
	}()

	here := platform{Architecture: runtime.GOARCH, OS: "linux"}
	conf := config{
		platform: here,
		Config:   runConfig{Entrypoint: m.Entrypoint, Cmd: m.Cmd, Env: m.Env, WorkingDir: m.WorkingDir, Labels: m.Labels},
		RootFS:   rootFS{Type: "layers", DiffIDs: []string{}},
	}
	man := manifest{SchemaVersion: 2, MediaType: mediaTypeManifest, Layers: []descriptor{}}
	for i, layer := range m.Layers {
		b, err := spool(layer)
		if err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
		blobs = append(blobs, b)
		// Layers are not compressed, so that a layer's digest is its diff id.
		conf.RootFS.DiffIDs = append(conf.RootFS.DiffIDs, b.digest)
		man.Layers = append(man.Layers, descriptor{MediaType: mediaTypeLayer, Digest: b.digest, Size: b.size})
	}
	confBlob, err := jsonBlob(conf)
	if err != nil {
		return err
	}
	man.Config = descriptor{MediaType: mediaTypeConfig, Digest: confBlob.digest, Size: confBlob.size}
	manBlob, err := jsonBlob(man)
	if err != nil {
		return err
	}
	blobs = append(blobs, confBlob, manBlob)
	top, err := json.Marshal(index{SchemaVersion: 2, MediaType: mediaTypeIndex, Manifests: []descriptor{{
		MediaType: mediaTypeManifest, Digest: manBlob.digest, Size: manBlob.size, Platform: &here,
		Annotations: map[string]string{
			"io.containerd.image.name":          m.Ref,
			"org.opencontainers.image.ref.name": m.Ref,
		},
	}}})
	if err != nil {
		return err
	}

	out := tar.NewWriter(w)
	if err := writeBytes(out, "oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	if err := writeBytes(out, "index.json", top); err != nil {
		return err
	}
	sort.Slice(blobs, func(i, j int) bool { return blobs[i].digest < blobs[j].digest })
	for i, b := range blobs {
		if i > 0 && b.digest == blobs[i-1].digest {
			continue // two equal layers are one blob
		}
		if err := writeBlob(out, b); err != nil {
			return err
		}
	}
	return out.Close()
}

func spool(layer *Layer) (b blob, err error) {
	f, err := os.CreateTemp("", "carve-layer")
	if err != nil {
		return blob{}, err
	}
	// The name is not needed: the open file is.
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return blob{}, err
	}
	sum := sha256.New()
	if err := layer.write(io.MultiWriter(f, sum)); err != nil {
		f.Close()
		return blob{}, err
	}
	size, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		f.Close()
		return blob{}, err
	}
	return blob{digest: "sha256:" + hex.EncodeToString(sum.Sum(nil)), size: size, file: f}, nil
}

func jsonBlob(v any) (blob, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return blob{}, err
	}
	sum := sha256.Sum256(data)
	return blob{digest: "sha256:" + hex.EncodeToString(sum[:]), size: int64(len(data)), data: data}, nil
}

func writeBytes(out *tar.Writer, name string, data []byte) error {
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: epoch}
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	_, err := out.Write(data)
	return err
}

func writeBlob(out *tar.Writer, b blob) error {
	name := "blobs/sha256/" + b.digest[len("sha256:"):]
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: b.size, ModTime: epoch}
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	var src io.Reader = bytes.NewReader(b.data)
	if b.file != nil {
		if _, err := b.file.Seek(0, io.SeekStart); err != nil {
			return err
		}
		src = b.file
	}
	_, err := io.Copy(out, src)
	return err
}

// epoch is every file's time: a build's clock must not show in its digest.
var epoch = time.Unix(0, 0)
