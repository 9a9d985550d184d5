package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/carve-gpu/carve/deploy/e2e/image"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

func (c *cli) image() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Short: "Write container images, without a daemon, and import them"}
	cmd.AddCommand(c.imageImport(), c.imageCarve(), c.imageProgram())
	return cmd
}

func (c *cli) imageImport() *cobra.Command {
	return &cobra.Command{
		Use: "import TAR...", Short: "Import image tars into the node's containerd",
		Args: args(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, tars []string) error {
			l, err := c.open()
			if err != nil {
				return err
			}
			for _, tar := range tars {
				if err := l.ImportImage(cmd.Context(), tar); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func (c *cli) imageCarve() *cobra.Command {
	var files image.CarveFiles
	var out string
	cmd := &cobra.Command{
		Use: "carve", Short: "Write the image of carve from its built files",
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return write(cmd.Context(), out, func(base *image.Layer) (image.Image, error) { return image.Carve(base, files) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&files.Carve, "carve", "bin/carve", "the carve binary")
	flags.StringVar(&files.Hook, "hook", "bin/carve-hook", "the static OCI hook")
	flags.StringVar(&files.CUDA, "cuda", "vgpu/lib/build/libcarve-cuda.so", "the front of libcuda")
	flags.StringVar(&files.NVML, "nvml", "vgpu/lib/build/libcarve-nvml.so", "the front of NVML")
	flags.StringVarP(&out, "output", "o", "carve.tar", "file to write")
	return cmd
}

func (c *cli) imageProgram() *cobra.Command {
	var ref, out string
	var extra []string
	cmd := &cobra.Command{
		Use: "program PROGRAM", Short: "Write an image of a program with its libraries and a shell",
		Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, programs []string) error {
			return write(cmd.Context(), out, func(base *image.Layer) (image.Image, error) {
				return image.Program(ref, base, programs[0], extra...)
			})
		},
	}
	cmd.Flags().StringVar(&ref, "ref", "", "name of the image, such as localhost/gpuprobe:dev")
	cmd.Flags().StringVarP(&out, "output", "o", "", "file to write")
	cmd.Flags().StringSliceVar(&extra, "library", nil, "library that the program opens only later, such as libdl.so.2 (repeatable)")
	for _, name := range []string{"ref", "output"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(fmt.Sprintf("flag %s is defined above: %v", name, err))
		}
	}
	return cmd
}

func write(ctx context.Context, out string, make func(*image.Layer) (image.Image, error)) error {
	base, err := lab.BaseLayer(ctx)
	if err != nil {
		return err
	}
	m, err := make(base)
	if err != nil {
		return err
	}
	if err := m.WriteFile(out); err != nil {
		return err
	}
	fmt.Println(m.Ref)
	return nil
}
