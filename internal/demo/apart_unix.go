//go:build unix

package demo

import (
	"os/exec"
	"syscall"
)

// apart keeps an interrupt typed at the terminal from a consumer's process: it goes on until everything is handled.
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
