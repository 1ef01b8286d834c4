package torture

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// mountSmall puts a file system of so many bytes, in memory, at a folder that it makes.
func mountSmall(path string, size int64) error {
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	if err := syscall.Mount("weir-torture", path, "tmpfs", 0, fmt.Sprintf("size=%d,mode=755", size)); err != nil {
		return errors.Join(fmt.Errorf("mount a small file system: %w", err), os.Remove(path))
	}
	return nil
}

func unmountSmall(path string) error { return syscall.Unmount(path, syscall.MNT_DETACH) }

// ballast fills the file system of a folder to the last byte. remove frees it again.
func ballast(folder string) (remove func() error, err error) {
	path := filepath.Join(folder, "ballast")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	at := int64(0)
	for step := int64(64 << 20); step >= 4096; {
		if syscall.Fallocate(int(f.Fd()), 0, at, step) == nil {
			at += step
		} else {
			step /= 2
		}
	}
	return func() error { return errors.Join(f.Close(), os.Remove(path)) }, nil
}

// ownerOf is whom a file belongs to.
func ownerOf(path string) (uid, gid int, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, 0, err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, errors.ErrUnsupported
	}
	return int(sys.Uid), int(sys.Gid), nil
}
