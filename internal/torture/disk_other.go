//go:build !linux

package torture

import "errors"

func mountSmall(string, int64) error { return errors.ErrUnsupported }

func unmountSmall(string) error { return nil }

func ballast(string) (remove func() error, err error) { return nil, errors.ErrUnsupported }

func ownerOf(string) (uid, gid int, err error) { return 0, 0, errors.ErrUnsupported }
