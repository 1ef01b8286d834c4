package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// versionJSON says what this program is.
type versionJSON struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func version() versionJSON {
	v := versionJSON{Version: "(devel)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

func (v versionJSON) String() string {
	text := "weir " + v.Version
	if v.Revision != "" {
		text += " (" + v.Revision[:min(12, len(v.Revision))]
		if v.Modified {
			text += ", modified"
		}
		text += ")"
	}
	return fmt.Sprintf("%s, %s, %s", text, v.Go, v.Platform)
}

func versionCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Long:    "Prints the version of this program, the revision it was built from, and the version of Go that built it.",
		Example: "  weir version\n  weir version --output json",
		Args:    arguments,
		RunE: func(*cobra.Command, []string) error {
			v := version()
			return g.print(v, func() error {
				_, err := fmt.Fprintln(g.out, v)
				return err
			})
		},
	}
}
