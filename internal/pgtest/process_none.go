//go:build !unix

package pgtest

import (
	"context"
	"errors"
	"os"
	"syscall"
)

// This file lets commands that use the package build on systems where it cannot
// run servers.

var errUnsupported = errors.New("running a private PostgreSQL server needs a Unix system")

type account struct{ name string }

func (u *account) chown(string) error       { return nil }
func (u *account) chownFile(*os.File) error { return nil }
func (u *account) reachable(string) error   { return nil }

func serverAccount() (*account, error)          { return nil, errUnsupported }
func ownerAccount(string) (*account, error)     { return nil, errUnsupported }
func serverAttr(*account) *syscall.SysProcAttr  { return nil }
func helperAttr(*account) *syscall.SysProcAttr  { return nil }
func commandAttr(*account) *syscall.SysProcAttr { return nil }
func isPostgres(int) bool                       { return false }
func killTree(context.Context, int) error       { return errUnsupported }
func tryLock(*os.File) bool                     { return false }

const (
	fastShutdown      = syscall.SIGINT
	immediateShutdown = syscall.SIGQUIT
	openNoFollow      = 0
)
