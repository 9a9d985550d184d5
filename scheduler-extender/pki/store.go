package pki

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// FromSecret reads the bundle from a Secret, and makes both if there is none.
// Of several callers at once one makes it and all get the same.
func FromSecret(ctx context.Context, kube kubernetes.Interface, namespace, name, client string, now time.Time) (Bundle, error) {
	fail := func(err error) (Bundle, error) {
		return Bundle{}, fmt.Errorf("certificates in secret %s/%s: %w", namespace, name, err)
	}
	secrets := kube.CoreV1().Secrets(namespace)
	s, err := secrets.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		b, err := NewBundle(client, now)
		if err != nil {
			return fail(err)
		}
		_, err = secrets.Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app.kubernetes.io/part-of": "carve"}},
			Type:       corev1.SecretTypeOpaque,
			Data:       b.parts(),
		}, metav1.CreateOptions{})
		if err == nil {
			return b, nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return fail(err)
		}
		if s, err = secrets.Get(ctx, name, metav1.GetOptions{}); err != nil {
			return fail(err)
		}
	} else if err != nil {
		return fail(err)
	}
	b, err := bundle(s.Data)
	if err != nil {
		return fail(err)
	}
	return b, nil
}

// FromDir reads the bundle from a directory, and makes it, readable by its owner
// only, if the directory has none of its parts. Several processes may do so at
// once.
func FromDir(dir, client string, now time.Time) (Bundle, error) {
	fail := func(err error) (Bundle, error) {
		return Bundle{}, fmt.Errorf("certificates in %s: %w", dir, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail(err)
	}
	parts, err := readParts(dir)
	if err != nil {
		return fail(err)
	}
	if len(parts) > 0 {
		b, err := bundle(parts)
		if err == nil {
			return b, nil
		}
		// Perhaps another process is writing them right now.
	}
	lock, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fail(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fail(err)
	}
	if parts, err = readParts(dir); err != nil {
		return fail(err)
	}
	if len(parts) > 0 {
		b, err := bundle(parts)
		if err != nil {
			return fail(err)
		}
		return b, nil
	}
	b, err := NewBundle(client, now)
	if err != nil {
		return fail(err)
	}
	if err := b.write(dir, CACert, CAKey, ClientCert, ClientKey); err != nil {
		return fail(err)
	}
	return b, nil
}

func readParts(dir string) (map[string][]byte, error) {
	parts := map[string][]byte{}
	for _, name := range []string{CACert, CAKey, ClientCert, ClientKey} {
		v, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		parts[name] = v
	}
	return parts, nil
}

// WriteClient writes what kube-scheduler needs, and no more, into a directory:
// the CA's certificate, its own certificate and key.
func (b Bundle) WriteClient(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write credentials: %w", err)
	}
	if err := b.write(dir, CACert, ClientCert, ClientKey); err != nil {
		return fmt.Errorf("write credentials: %w", err)
	}
	return nil
}

// write replaces files whole, readable by their owner only.
func (b Bundle) write(dir string, names ...string) error {
	for _, name := range names {
		f, err := os.CreateTemp(dir, "."+name+"-*") // mode 0600
		if err != nil {
			return err
		}
		_, err = f.Write(b.parts()[name])
		err = errors.Join(err, f.Sync(), f.Close())
		if err == nil {
			err = os.Rename(f.Name(), filepath.Join(dir, name))
		}
		if err != nil {
			return errors.Join(err, os.Remove(f.Name()))
		}
	}
	return nil
}
